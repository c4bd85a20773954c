//! Copy plans against element-by-element copying, over random shapes, layouts and selections.

use kvbm_layout::{BlockLayout, CopyPlan, FragmentList, LayoutConfig, Planes, Selection, Span};
use proptest::prelude::*;

use crate::naive::{self, Memory};
use crate::shapes::{Kind, any_config, any_kind, lay_out};

/// `config` with more layers and heads, as the full model that a rank holds a slice of.
fn widen(config: &LayoutConfig, layers: u32, heads: u32) -> LayoutConfig {
    let head = config.inner_dim / config.num_heads;
    let value = config.value_inner_dim.map(|dim| dim / config.num_heads);
    let num_heads = config.num_heads + heads;
    LayoutConfig {
        num_layers: config.num_layers + layers,
        num_heads,
        inner_dim: head * num_heads,
        value_inner_dim: value.map(|dim| dim * num_heads),
        ..config.clone()
    }
}

/// A copy of `len` layers and heads between layouts that have more of them on either side.
#[derive(Debug, Clone)]
struct Case {
    src: (Kind, LayoutConfig),
    dst: (Kind, LayoutConfig),
    selection: Selection,
}

fn any_case() -> impl Strategy<Value = Case> {
    let extra = || (0_u32..3, 0_u32..3, 0_u32..3, 0_u32..3);
    (any_config(), (any_kind(), any_kind()), (extra(), extra()), any::<[bool; 4]>()).prop_map(
        |(mut config, kinds, (src, dst), [cut_layers, cut_heads, planes, cut_planes])| {
            config.alignment = config.alignment.min(16);
            let mut selection = Selection::all();
            let clip = |cut: bool, extra: u32| if cut { extra } else { 0 };
            if cut_layers {
                selection.layers = Some(Span { src: src.0, dst: dst.0, len: config.num_layers });
            }
            if cut_heads {
                selection.heads = Some(Span { src: src.2, dst: dst.2, len: config.num_heads });
            }
            if (cut_heads || !planes) && config.outer_dim > 0 {
                selection.planes = Planes::Skip;
            } else if cut_planes && !config.planes.is_empty() {
                let (first, count) = (src.1, 1 + dst.1);
                let all = config.planes.len() as u32;
                let first = first.min(all - 1);
                selection.planes = Planes::Some { first, count: count.min(all - first) };
            }
            let side = |(l0, l1, h0, h1): (u32, u32, u32, u32)| {
                let heads = if config.outer_dim > 0 { clip(cut_heads, h0 + h1) } else { 0 };
                widen(&config, clip(cut_layers, l0 + l1), heads)
            };
            if config.outer_dim == 0 {
                selection.heads = None;
            }
            Case { src: (kinds.0, side(src)), dst: (kinds.1, side(dst)), selection }
        },
    )
}

fn run(plan: &CopyPlan, blocks: (u32, u32), src: &Memory, dst: &mut Memory) {
    plan.for_each_run(blocks.0, blocks.1, |run| {
        let from = run.src_offset as usize..(run.src_offset + run.len) as usize;
        let to = run.dst_offset as usize..(run.dst_offset + run.len) as usize;
        dst[run.dst_region as usize][to].copy_from_slice(&src[run.src_region as usize][from]);
    })
    .unwrap();
}

/// As [`run`], grid by grid.
fn run_grids(plan: &CopyPlan, blocks: (u32, u32), src: &Memory, dst: &mut Memory) -> u64 {
    let mut grids = 0;
    for grid in plan.grids(blocks.0, blocks.1).unwrap() {
        let [outer, inner] = grid.axes;
        for (o, i) in (0..outer.count).flat_map(|o| (0..inner.count).map(move |i| (o, i))) {
            let from = (grid.src_offset + o * outer.src_stride + i * inner.src_stride) as usize;
            let to = (grid.dst_offset + o * outer.dst_stride + i * inner.dst_stride) as usize;
            let len = grid.run_bytes as usize;
            dst[grid.dst_region as usize][to..to + len]
                .copy_from_slice(&src[grid.src_region as usize][from..from + len]);
        }
        grids += 1;
    }
    grids
}

/// Copies through the fragments of the source into a slot, if the destination is one.
fn gather(
    fragments: &FragmentList,
    (src, dst): (&dyn BlockLayout, &dyn BlockLayout),
    blocks: (u32, u32),
    from: &Memory,
    to: &mut Memory,
) {
    let slot = dst.contiguous_block().unwrap();
    let start = slot.offset + u64::from(blocks.1) * slot.stride;
    let mut end = 0;
    for fragment in fragments.fragments(blocks.0).unwrap() {
        assert!(fragment.slot_offset >= end, "sorted and apart");
        end = fragment.slot_offset + fragment.len;
        let bytes = &from[fragment.region as usize][fragment.offset as usize..][..fragment.len as usize];
        to[slot.region as usize][(start + fragment.slot_offset) as usize..][..bytes.len()]
            .copy_from_slice(bytes);
    }
    assert!(end <= slot.bytes);
    assert!(src.config().num_blocks > blocks.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn a_plan_copies_what_element_by_element_copying_copies(case in any_case(), pick in any::<(u32, u32)>()) {
        let (src, dst) = (lay_out(case.src.0, &case.src.1), lay_out(case.dst.0, &case.dst.1));
        let blocks = (pick.0 % src.config().num_blocks, pick.1 % dst.config().num_blocks);
        let plan = CopyPlan::between(&*src, &*dst, &case.selection).unwrap();

        let moves = naive::moves((&*src, blocks.0), (&*dst, blocks.1), &case.selection);
        let from = naive::memory(&*src, 1);
        let (mut expected, mut copied) = (naive::memory(&*dst, 2), naive::memory(&*dst, 2));
        naive::apply(&moves, &from, &mut expected);
        run(&plan, blocks, &from, &mut copied);
        prop_assert!(copied == expected, "{:?}", plan);
        prop_assert_eq!(plan.bytes_per_block(), moves.len() as u64);
        let mut in_grids = naive::memory(&*dst, 2);
        prop_assert_eq!(run_grids(&plan, blocks, &from, &mut in_grids), plan.num_grids());
        prop_assert!(in_grids == expected, "{:?}", plan);

        // The same plan backwards brings the bytes home, and touches nothing else.
        let mut home = naive::memory(&*src, 3);
        let mut expected_home = naive::memory(&*src, 3);
        let back: Vec<_> = moves.iter().map(|step| naive::Move { src: step.dst, dst: step.src }).collect();
        naive::apply(&back, &copied, &mut expected_home);
        run(&plan.reversed(), (blocks.1, blocks.0), &copied, &mut home);
        prop_assert!(home == expected_home);

        // As few runs as there can be, but for corners of permuted axes, which join two runs at
        // most.
        let fewest = naive::fewest_runs(&moves);
        prop_assert!(plan.num_runs() < 2 * fewest, "{} runs, {fewest} possible: {plan:?}", plan.num_runs());

        if dst.contiguous_block().is_some() {
            let fragments = FragmentList::between(&*src, &*dst, &case.selection).unwrap();
            let mut gathered = naive::memory(&*dst, 2);
            gather(&fragments, (&*src, &*dst), blocks, &from, &mut gathered);
            prop_assert!(gathered == expected);
            prop_assert_eq!(fragments.len() as u64, fewest, "touching fragments are joined");
            prop_assert_eq!(fragments.bytes(), plan.bytes_per_block());
            prop_assert_eq!(fragments.covers_slot(), plan.bytes_per_block() == dst.bytes_per_block());
        }
    }
}
