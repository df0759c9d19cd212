//! Tokens of an expert group between processors: to the ranks that have one of their experts, and
//! what became of each choice back. The host reads choices before rows travel, so that both ends
//! know which do.

use super::tokens::chunks;
use super::{Links, Parcel, Way};
use crate::engine::group::ExpertGroup;
use moejob_kernels::peer::Need;
use moejob_kernels::{Buffer, CpuDevice, DType, Device};
use moejob_protocol::communication::Verb;

impl Links {
    /// See [`Links::gather_tokens`].
    pub(super) fn gather_needed(
        &mut self,
        device: &mut Device,
        (group, need): (&ExpertGroup, &Need),
        rows: Buffer,
        weights: Option<Buffer>,
    ) {
        let me = group.me;
        let others = || (0..group.ranks.len()).filter(move |position| *position != me);
        if let Some(weights) = weights {
            let words = [need.ids, weights];
            let of = |whose| chunks(group, &words, whose);
            let sends: Vec<Parcel> = others().map(|to| (group.ranks[to], of(me))).collect();
            let receives: Vec<Parcel> =
                others().map(|from| (group.ranks[from], of(from))).collect();
            self.exchange_as(Verb::Dispatch, device, &sends, &receives);
        }
        self.exchange_needed(Verb::Dispatch, device, (group, need), &[rows]);
    }

    /// See [`Links::scatter_tokens`]: `need` is of choices, each of which has one expert, so that
    /// what comes back of it is no sum.
    pub(super) fn scatter_needed(
        &mut self,
        device: &mut Device,
        of: (&ExpertGroup, &Need),
        all: &[Buffer],
    ) {
        self.exchange_needed(Verb::Combine, device, of, all);
    }

    /// Rows of tokens to those that have experts of them, or back.
    fn exchange_needed(
        &mut self,
        verb: Verb,
        device: &mut Device,
        (group, need): (&ExpertGroup, &Need),
        all: &[Buffer],
    ) {
        if self.has_failed() {
            return;
        }
        let begun = device.begin_stretch(false);
        let rows = need.experts.len() * need.tokens;
        let mut bytes = 0;
        self.attempt(|comm, way| {
            let (Way::Host(host), Some(cpu)) = (way, device.as_cpu_mut()) else { return Ok(()) };
            let ids = cpu.slice::<u32>(need.ids);
            let others = (0..group.ranks.len()).filter(|position| *position != group.me);
            let (mut own, mut of_others) = (Vec::new(), Vec::new());
            for other in others {
                own.push((group.ranks[other], needed(ids, need, (group.me, other))));
                of_others.push((group.ranks[other], needed(ids, need, (other, group.me))));
            }
            let ways = match verb {
                Verb::Combine => [&of_others[..], &own[..]],
                _ => [&own[..], &of_others[..]],
            };
            let sent: usize = ways[0].iter().map(|(_, rows)| rows.len()).sum();
            let each: usize = all.iter().map(|buffer| buffer.bytes() / rows).sum();
            bytes = (sent * each) as u64;
            host.exchange_rows(cpu, comm, (all, rows), ways)
        });
        self.sent(device, begun, (verb, self.link()), bytes);
    }

    /// For tests: rows that no expert here needs are no numbers.
    pub(super) fn spoil_others(
        &self,
        device: &mut Device,
        (group, need): (&ExpertGroup, &Need),
        rows: Buffer,
    ) {
        if let (true, Some(cpu)) = (self.by_need, device.as_cpu_mut()) {
            keep_needed(cpu, group.me, need, rows);
        }
    }
}

/// The rows of tokens of `source` for which `holder` has an expert.
fn needed(ids: &[u32], need: &Need, (source, holder): (usize, usize)) -> Vec<usize> {
    if source >= need.present {
        return Vec::new();
    }
    let (first, count) = need.experts[holder];
    let begin = source * need.tokens;
    let ids = &ids[begin * need.top_k..][..need.tokens * need.top_k];
    let here = |ids: &[u32]| ids.iter().any(|id| id.wrapping_sub(first) < count);
    let rows = ids.chunks_exact(need.top_k).enumerate();
    rows.filter(|(_, ids)| here(ids)).map(|(row, _)| begin + row).collect()
}

/// The rows of tokens of `source` for which `holder` has no expert.
fn others<'a>(
    ids: &[u32],
    need: &'a Need,
    (source, holder): (usize, usize),
) -> impl Iterator<Item = usize> + use<'a> {
    let needed = needed(ids, need, (source, holder));
    let all = source * need.tokens..(source + 1) * need.tokens;
    all.filter(move |row| needed.binary_search(row).is_err())
}

/// What windows would not bring is no number afterwards.
fn keep_needed(cpu: &mut CpuDevice, me: usize, need: &Need, rows: Buffer) {
    let ranks = need.experts.len();
    let width = rows.len() / (ranks * need.tokens);
    let ids = cpu.slice::<u32>(need.ids).to_vec();
    let sources = (0..ranks).filter(|source| *source != me);
    for row in sources.flat_map(|source| others(&ids, need, (source, me))) {
        match rows.dtype() {
            DType::F64 => cpu.slice_mut::<f64>(rows.slice(row * width, width)).fill(f64::NAN),
            _ => cpu.slice_mut::<f32>(rows.slice(row * width, width)).fill(f32::NAN),
        }
    }
}

/// What windows would not take adds nothing.
///
/// # Panics
/// It does.
pub(super) fn check_nothing_else(cpu: &CpuDevice, me: usize, need: &Need, part: Buffer) {
    let ranks = need.experts.len();
    let width = part.len() / (ranks * need.tokens);
    let ids = cpu.slice::<u32>(need.ids);
    for row in (0..need.present).flat_map(|source| others(ids, need, (source, me))) {
        let bytes = part.slice(row * width, width).reinterpret(DType::U8);
        assert!(cpu.slice::<u8>(bytes).iter().all(|byte| *byte == 0), "row {row} adds to it");
    }
}
