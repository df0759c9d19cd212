//! See [`crate::RoutePlan`].

use super::{CpuDevice, Float, ROWS_PER_JOB};
use crate::place::NO_EXPERT;
use crate::route_plan::{GatherCounted, MapIds, Room, RoutePlan};

/// Where an expert is computed; none for a choice that names none.
struct Homes<'a> {
    owner: &'a [u32],
    local: &'a [u32],
}

impl Homes<'_> {
    fn owner(&self, id: u32) -> Option<usize> {
        self.owner.get(id as usize).map(|owner| *owner as usize)
    }
}

impl CpuDevice {
    pub(crate) fn route_plan(&mut self, op: &RoutePlan) {
        let (mut views, _) = self.split();
        let all_ids: &[u32] = views.read(op.all_ids);
        let ids: &[u32] = views.read(op.ids);
        let homes = Homes { owner: views.read(op.owner), local: views.read(op.local) };
        let first: &[u32] = views.read(op.first);
        let offsets: &[u32] = views.read(op.offsets);
        let tokens: usize = op.sources.iter().sum();
        assert_eq!(all_ids.len(), tokens * op.top_k, "{op:?}");
        assert_eq!(first.len(), op.positions + 1, "{op:?}");
        let segments: &mut [u32] = views.write(op.segments);
        let arrived: &mut [u32] = views.write(op.arrived);
        assert_eq!(segments.len(), op.locals * op.sources.len() + 1, "{op:?}");
        assert_eq!(arrived.len(), op.sources.len() + 1, "{op:?}");
        let (rows, slots) = (views.write(op.rows), views.write(op.slots));
        let departures: &mut [u32] = views.write(op.departures);
        let returns: &mut [u32] = views.write(op.returns);
        let leaving: &mut [u32] = views.write(op.leaving);
        let overflows: &mut [f64] = views.write(op.overflows);
        segments.fill(0);
        arrived.fill(0);
        departures.fill(0);
        returns.fill(0);
        if overflows_anywhere(op, &homes, all_ids) {
            overflows[0] += 1.0;
            return;
        }
        place_rows(op, &homes, all_ids, [segments, arrived], [rows, slots]);
        if ids.is_empty() {
            return;
        }
        let mut left = 0;
        for position in 0..op.positions {
            let goes = |ids: &[u32]| ids.iter().any(|id| homes.owner(*id) == Some(position));
            let tokens = ids.chunks_exact(op.top_k).enumerate().filter(|(_, ids)| goes(ids));
            for (token, _) in tokens {
                leaving[left] = token as u32;
                left += 1;
            }
            departures[position + 1] = left as u32;
        }
        for (returns, first) in returns.iter_mut().zip(first) {
            *returns = offsets[*first as usize];
        }
    }

    pub(crate) fn gather_counted<T: Float>(&mut self, op: &GatherCounted) {
        let (mut views, exec) = self.split();
        let count: &[u32] = views.read(op.count);
        let x: &[T] = views.read(op.x);
        let index: &[u32] = views.read(op.index);
        let y: &mut [T] = views.write(op.y);
        let rows = count[0] as usize;
        let (index, y) = (&index[..rows], &mut y[..rows * op.dim]);
        let jobs = y.chunks_mut(ROWS_PER_JOB * op.dim).zip(index.chunks(ROWS_PER_JOB)).collect();
        exec.run(jobs, rows * op.dim, |(y, index)| {
            for (y, row) in y.chunks_exact_mut(op.dim).zip(index) {
                y.copy_from_slice(&x[*row as usize * op.dim..][..op.dim]);
            }
        });
    }

    pub(crate) fn map_ids(&mut self, op: &MapIds) {
        let (mut views, _) = self.split();
        let table: &[u32] = views.read(op.table);
        let ids: &[u32] = views.read(op.ids);
        let out: &mut [u32] = views.write(op.out);
        assert_eq!(ids.len(), out.len(), "{op:?}");
        for (out, id) in out.iter_mut().zip(ids) {
            *out = if *id == NO_EXPERT { NO_EXPERT } else { table[*id as usize] };
        }
    }
}

/// Whether a rank of the group gets more than it has room for.
fn overflows_anywhere(op: &RoutePlan, homes: &Homes, all_ids: &[u32]) -> bool {
    assert_eq!(op.rooms.len(), op.positions, "{op:?}");
    let mut needs = vec![Room { rows: 0, tokens: 0 }; op.positions];
    // The last token, counted from 1, that each rank got.
    let mut last = vec![0; op.positions];
    for (token, ids) in (1..).zip(all_ids.chunks_exact(op.top_k)) {
        for owner in ids.iter().filter_map(|id| homes.owner(*id)) {
            needs[owner].rows += 1;
            needs[owner].tokens += usize::from(last[owner] != token);
            last[owner] = token;
        }
    }
    let mut pairs = needs.iter().zip(op.rooms);
    pairs.any(|(need, room)| need.rows > room.rows || need.tokens > room.tokens)
}

/// The rows computed here, by (expert, source, token): counted first, then placed.
fn place_rows(
    op: &RoutePlan,
    homes: &Homes,
    all_ids: &[u32],
    [segments, arrived]: [&mut [u32]; 2],
    [rows, slots]: [&mut [u32]; 2],
) {
    let sources = op.sources.len();
    let here = |id: u32| {
        let here = homes.owner(id) == Some(op.me);
        here.then(|| homes.local[id as usize] as usize)
    };
    let of_source = |s: usize| {
        let before: usize = op.sources[..s].iter().sum();
        let first = before * op.top_k;
        (first, &all_ids[first..first + op.sources[s] * op.top_k])
    };
    for s in 0..sources {
        for local in of_source(s).1.iter().filter_map(|id| here(*id)) {
            segments[local * sources + s + 1] += 1;
        }
    }
    for at in 1..segments.len() {
        segments[at] += segments[at - 1];
    }
    let mut next = segments.to_vec();
    let mut token = 0;
    for s in 0..sources {
        let (first, ids) = of_source(s);
        for (at, ids) in ids.chunks_exact(op.top_k).enumerate() {
            let mut comes = false;
            for (k, local) in ids.iter().enumerate().filter_map(|(k, id)| Some((k, here(*id)?))) {
                let row = &mut next[local * sources + s];
                rows[*row as usize] = token;
                slots[*row as usize] = (first + at * op.top_k + k) as u32;
                *row += 1;
                comes = true;
            }
            token += u32::from(comes);
        }
        arrived[s + 1] = token;
    }
}
