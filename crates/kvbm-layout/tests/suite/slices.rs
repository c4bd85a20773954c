//! Tensor-parallel slices: every head has exactly one writer, and ranks agree with what engines do.

use kvbm_layout::{BlockPart, Holders, Selection, Span, slice_for_rank};

#[test]
fn every_head_is_held_and_written_once() {
    for heads in [1, 2, 4, 8] {
        for tp in 1..=16 {
            let slices: Vec<_> = (0..tp).map(|rank| slice_for_rank(heads, tp, rank).unwrap()).collect();
            for head in 0..heads {
                let holders: Vec<u32> =
                    (0..tp).filter(|&rank| slices[rank as usize].heads.contains(&head)).collect();
                let writers = holders.iter().filter(|&&rank| slices[rank as usize].is_writer(rank)).count();
                assert_eq!(writers, 1, "head {head} of {heads}, tp {tp}");
                for &rank in &holders {
                    let expected = if holders.len() == 1 {
                        Holders::One
                    } else {
                        Holders::Several { writer: holders[0], ranks: holders.len() as u32 }
                    };
                    assert_eq!(
                        slices[rank as usize].holders, expected,
                        "heads {heads}, tp {tp}, rank {rank}"
                    );
                }
            }
            let lengths: Vec<_> = slices.iter().map(|slice| slice.heads.len()).collect();
            assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1, "balanced");
            assert!(
                slices.windows(2).all(|pair| pair[0].heads.start <= pair[1].heads.start),
                "in order of rank"
            );
        }
    }
}

#[test]
fn the_usual_shapes() {
    let slice = |heads, tp, rank| slice_for_rank(heads, tp, rank).unwrap();
    assert_eq!(slice(8, 4, 3).heads, 6..8);
    assert_eq!(slice(8, 16, 5).heads, 2..3);
    assert_eq!(slice(8, 16, 5).holders, Holders::Several { writer: 4, ranks: 2 });
    assert!(slice(8, 16, 4).is_writer(4) && !slice(8, 16, 5).is_writer(5));
    assert_eq!(slice(1, 8, 7).holders, Holders::Several { writer: 0, ranks: 8 });
    assert_eq!(slice(8, 1, 0).heads, 0..8);
    assert_eq!(slice(u32::MAX, u32::MAX, u32::MAX - 1).heads, u32::MAX - 1..u32::MAX);
    assert_eq!(slice(1, u32::MAX, 9).holders, Holders::Several { writer: 0, ranks: u32::MAX });
}

#[test]
fn nonsense_names_the_argument() {
    for ((heads, tp, rank), field) in [((0, 1, 0), "num_heads"), ((1, 0, 0), "tp_size"), ((8, 4, 4), "rank")]
    {
        assert_eq!(slice_for_rank(heads, tp, rank).unwrap_err().field, field);
    }
}

#[test]
fn overlap_of_two_deployments() {
    let src = BlockPart { layers: 0..40, heads: 4..8 };
    let dst = BlockPart { layers: 32..64, heads: 6..7 };
    let expected = Selection {
        layers: Some(Span { src: 32, dst: 0, len: 8 }),
        heads: Some(Span { src: 2, dst: 0, len: 1 }),
        ..Selection::all()
    };
    assert_eq!(src.overlap(&dst), Some(expected));
    assert_eq!(src.overlap(&BlockPart { layers: 40..64, heads: 4..8 }), None);
    assert_eq!(src.overlap(&BlockPart { layers: 0..40, heads: 0..4 }), None);
}

/// Whatever two deployments look like, the overlaps of their ranks' slices cover every head of
/// every destination rank exactly once when only writers send.
#[test]
fn resharding_covers_every_destination_once() {
    for heads in [1, 2, 4, 8] {
        for (from_tp, to_tp) in (1..=16).flat_map(|a| (1..=16).map(move |b| (a, b))) {
            for to in 0..to_tp {
                let dst = BlockPart { layers: 0..1, heads: slice_for_rank(heads, to_tp, to).unwrap().heads };
                let mut seen = vec![0; dst.heads.len()];
                for from in 0..from_tp {
                    let slice = slice_for_rank(heads, from_tp, from).unwrap();
                    let sends = slice.is_writer(from);
                    let overlap = BlockPart { layers: 0..1, heads: slice.heads }.overlap(&dst);
                    if let Some(Selection { heads: Some(span), .. }) = overlap.filter(|_| sends) {
                        seen[span.dst as usize..][..span.len as usize]
                            .iter_mut()
                            .for_each(|count| *count += 1);
                    }
                }
                assert!(
                    seen.iter().all(|&count| count == 1),
                    "{heads} heads, tp {from_tp} to {to_tp}, rank {to}"
                );
            }
        }
    }
}
