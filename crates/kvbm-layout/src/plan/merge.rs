//! Joining runs: fewer and longer is faster for every consumer of a plan.

use super::{Dim, Segment};

/// Joins the segments of all cells; one row per layer, in layer order, one column per cell.
pub(super) fn rows(mut rows: Vec<Vec<Segment>>) -> Vec<Segment> {
    rows.iter_mut().for_each(join);
    let width = rows.first().map_or(0, Vec::len);
    let regular = rows.iter().all(|row| row.len() == width);
    let mut segments = if regular { by_column(&rows, width) } else { rows.concat() };
    sort_by_destination(&mut segments);
    join(&mut segments);
    segments
}

/// The same cell of all layers, joined over the layers.
fn by_column(rows: &[Vec<Segment>], width: usize) -> Vec<Segment> {
    (0..width)
        .flat_map(|column| {
            let mut segments: Vec<Segment> = rows.iter().map(|row| row[column]).collect();
            join(&mut segments);
            segments
        })
        .collect()
}

/// Sorts segments by where they start in the destination.
pub(super) fn sort_by_destination(segments: &mut [Segment]) {
    segments.sort_by_key(|segment| (segment.dst_region, segment.dst_offset));
}

/// Joins neighbours until nothing changes: touching runs first (fewer runs), then regular series
/// (fewer segments).
fn join(segments: &mut Vec<Segment>) {
    loop {
        let before = segments.len();
        join_neighbours(segments, touching);
        join_series(segments);
        if segments.len() == before {
            return;
        }
    }
}

fn join_neighbours(segments: &mut Vec<Segment>, joined: impl Fn(&Segment, &Segment) -> Option<Segment>) {
    let mut kept = 0;
    for next in 1..segments.len() {
        if let Some(both) = joined(&segments[kept], &segments[next]) {
            segments[kept] = both;
        } else {
            kept += 1;
            segments[kept] = segments[next];
        }
    }
    segments.truncate(kept + 1);
    segments.iter_mut().for_each(coalesce);
}

/// One segment for two whose runs touch pairwise on both sides.
fn touching(a: &Segment, b: &Segment) -> Option<Segment> {
    let touch = same_place(a, b)
        && a.dims() == b.dims()
        && b.src_offset == a.src_offset + a.run_bytes
        && b.dst_offset == a.dst_offset + a.run_bytes;
    touch.then(|| Segment { run_bytes: a.run_bytes + b.run_bytes, ..*a })
}

/// Replaces series of equal segments at equal distances by one segment with one more axis.
fn join_series(segments: &mut Vec<Segment>) {
    let mut joined = Vec::with_capacity(segments.len());
    let mut rest = segments.as_slice();
    while let Some(first) = rest.first() {
        let (mut both, mut taken) = (*first, 1);
        if let Some(mut dim) = rest.get(1).and_then(|second| distance(first, second)) {
            let steps = rest.windows(2).take_while(|pair| distance(&pair[0], &pair[1]) == Some(dim)).count();
            dim.count = steps as u64 + 1;
            if both.dims.push(dim) {
                taken = steps + 1;
                coalesce(&mut both);
            }
        }
        joined.push(both);
        rest = &rest[taken..];
    }
    *segments = joined;
}

/// How far `b` is after `a`, if they are otherwise equal.
fn distance(a: &Segment, b: &Segment) -> Option<Dim> {
    if !same_place(a, b) || a.run_bytes != b.run_bytes || a.dims() != b.dims() {
        return None;
    }
    let ahead = |a: u64, b: u64| b.checked_sub(a).filter(|&stride| stride > 0);
    let src_stride = ahead(a.src_offset, b.src_offset)?;
    Some(Dim { count: 2, src_stride, dst_stride: ahead(a.dst_offset, b.dst_offset)? })
}

fn same_place(a: &Segment, b: &Segment) -> bool {
    (a.src_region, a.dst_region) == (b.src_region, b.dst_region)
        && (a.src_block_stride, a.dst_block_stride) == (b.src_block_stride, b.dst_block_stride)
}

/// Grows runs along axes that continue them on both sides, joins axes that continue each other, and
/// sorts the rest.
pub(super) fn coalesce(segment: &mut Segment) {
    let run = segment.run_bytes;
    if let Some(index) = segment.dims().iter().position(|dim| (dim.src_stride, dim.dst_stride) == (run, run))
    {
        segment.run_bytes *= segment.dims()[index].count;
        segment.dims.remove(index);
        return coalesce(segment);
    }
    let continues = |outer: &Dim, inner: &Dim| {
        outer.src_stride == inner.src_stride * inner.count
            && outer.dst_stride == inner.dst_stride * inner.count
    };
    let dims = segment.dims();
    let pair = (0..dims.len())
        .flat_map(|outer| (0..dims.len()).map(move |inner| (outer, inner)))
        .find(|&(outer, inner)| outer != inner && continues(&dims[outer], &dims[inner]));
    if let Some((outer, inner)) = pair {
        let count = dims[outer].count;
        segment.dims.as_mut_slice()[inner].count *= count;
        segment.dims.remove(outer);
        return coalesce(segment);
    }
    sort_dims(segment);
}

/// Sorts axes so that runs come in the order of the destination.
pub(super) fn sort_dims(segment: &mut Segment) {
    segment.dims.as_mut_slice().sort_by_key(|dim| std::cmp::Reverse((dim.dst_stride, dim.src_stride)));
}
