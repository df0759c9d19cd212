//! Tokens of an expert group by need: to the ranks that have one of their experts, in lists, and
//! what these made of them back.
//!
//! ```text
//! one hop      own tokens -> ranks of their experts
//! two hops     own tokens -> on each node that has experts of them, the rank of the own place
//!                         -> ranks of their experts there
//! out          rows by the rank that they go to -> rows by the rank that they came from
//! back         a row of each choice here, in the order of the tokens here and of their slots
//!              -> the same way, each choice's at its own token
//! or back      a sum of each token's choices here -> the same way, summed up again on each stop
//! ```
//! With two hops a token crosses to a node once, however many of its experts are there, and a sum
//! crosses back once. Both ends of a hop know how many rows travel: choices leave first, through
//! the gang, and tell it. Nothing grows with the number of ranks but with what a rank's own tokens
//! and experts are.

use super::{Links, Parcel};
use crate::gang::comm::CommError;
use moejob_kernels::{Buffer, DType, Device, Element, GatherRows, NO_EXPERT, ScatterSum};
use moejob_protocol::buffers::{Leaving, Needed};
use moejob_protocol::communication::Verb;
use std::ops::Range;

/// The ranks between which tokens travel at once, and with what.
#[derive(Clone, Debug)]
pub(crate) struct Hop<'a> {
    /// By position, with the own one.
    pub ranks: Vec<u32>,
    pub me: usize,
    /// Places of the experts that are reached by each rank, which rise.
    pub places: Vec<Range<u32>>,
    /// `D`
    pub dim: usize,
    pub need: &'a Needed<Buffer>,
    /// Tokens that leave, and what comes back of them.
    pub leaving: Leaving<Buffer>,
    /// Tokens that came.
    pub x: Buffer,
    /// Where the next hop brings here what goes back by this one; None: there is no other.
    pub returned: Option<Leaving<Buffer>>,
}

/// The rows that come back of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Back {
    /// The row of each choice.
    Choices,
    /// From each rank that it went to the sum over its choices there.
    Sums,
}

/// An exchange of tokens by need, there and back.
#[derive(Clone, Debug)]
pub(crate) struct Journey<'a> {
    /// The last one leads to the experts.
    pub hops: Vec<Hop<'a>>,
    pub top_k: usize,
    pub back: Back,
    /// Ids and weights of the tokens here, behind the last hop.
    pub ids: Buffer,
    pub weights: Buffer,
}

/// Own tokens with the ids and weights of their choices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnTokens {
    pub x: Buffer,
    pub ids: Buffer,
    pub weights: Buffer,
}

/// How many rows of a layer travel between this rank and each of a hop, from forward to backward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Route {
    /// By position: tokens that go there, and choices of them that come back.
    sent: Vec<Rows>,
    /// Tokens that come from there, and choices of them that go back.
    came: Vec<Rows>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Rows {
    tokens: usize,
    choices: usize,
}

/// Which rows here each rank of a hop needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Needs {
    /// By position.
    rows: Vec<Rows>,
    /// By position and source: tokens.
    of_sources: Vec<Vec<u32>>,
    /// Tokens by position, ascending.
    tokens: Vec<u32>,
    /// `[token, slot]`: which of the rows of choices that come back is its; `NO_EXPERT` of a slot
    /// without one.
    back: Vec<u32>,
    /// `[token, slot]`: which of the sums that come back, one from each rank, each with the first
    /// of the token's slots that it has a part of.
    sums: Vec<u32>,
}

impl Needs {
    /// The needs of choices [T, K] of experts, by their places: by rank p those of `places[p]` are
    /// reached, which rise. Tokens of source s end before `ends[s]`.
    fn of(ids: &[u32], top_k: usize, places: &[Range<u32>], ends: &[u32]) -> Needs {
        let whose = |id: u32| {
            let at = places.partition_point(|range| range.end <= id);
            places.get(at).filter(|range| range.contains(&id)).map(|_| at)
        };
        let owners: Vec<Option<usize>> = ids.iter().map(|id| whose(*id)).collect();
        let mut rows = vec![Rows::default(); places.len()];
        let mut of_rank: Vec<Vec<u32>> = vec![Vec::new(); places.len()];
        let mut firsts = vec![None; ids.len()];
        for (slot, owner) in owners.iter().enumerate() {
            let (Some(owner), token) = (*owner, (slot / top_k) as u32) else { continue };
            rows[owner].choices += 1;
            if of_rank[owner].last() != Some(&token) {
                firsts[slot] = Some((owner, of_rank[owner].len() as u32));
                of_rank[owner].push(token);
            }
        }
        for (rows, tokens) in rows.iter_mut().zip(&of_rank) {
            rows.tokens = tokens.len();
        }
        let counts = |tokens: &Vec<u32>| {
            let before = |end: &u32| tokens.partition_point(|token| token < end) as u32;
            let ends: Vec<u32> = ends.iter().map(before).collect();
            let begins = std::iter::once(&0).chain(&ends);
            ends.iter().zip(begins).map(|(end, begin)| end - begin).collect()
        };
        let of_sources = of_rank.iter().map(counts).collect();
        let mut next: Vec<u32> = begins(&rows, |rows| rows.choices);
        let mut place = |owner: &Option<usize>| {
            let next = &mut next[(*owner)?];
            *next += 1;
            Some(*next - 1)
        };
        let back = owners.iter().map(|owner| place(owner).unwrap_or(NO_EXPERT)).collect();
        let first = begins(&rows, |rows| rows.tokens);
        let sum = |of: &Option<(usize, u32)>| of.map_or(NO_EXPERT, |(owner, at)| first[owner] + at);
        let sums = firsts.iter().map(sum).collect();
        Needs { rows, of_sources, tokens: of_rank.concat(), back, sums }
    }

    /// The tokens of each rank.
    fn by_rank(&self) -> impl Iterator<Item = &[u32]> {
        let mut rest = &self.tokens[..];
        self.rows.iter().map(move |rows| rest.split_off(..rows.tokens).unwrap_or_default())
    }
}

/// Where the rows of each rank begin, and behind the last how many there are.
fn begins(rows: &[Rows], count: impl Fn(&Rows) -> usize) -> Vec<u32> {
    ends(rows.iter().map(|rows| count(rows) as u32))
}

fn ends(counts: impl Iterator<Item = u32>) -> Vec<u32> {
    let sums = counts.scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

impl Hop<'_> {
    /// As what is told that travels so: the last hop does so `within` a node, if there are two.
    fn verb(&self, within: Verb) -> Verb {
        if self.returned.is_some() { Verb::SendRecv } else { within }
    }

    /// The rows of each rank in a buffer of rows of `width`.
    fn parcels(
        &self,
        rows: &[Rows],
        count: impl Fn(&Rows) -> usize,
        (buffer, width): (Buffer, usize),
    ) -> Vec<Parcel> {
        let begins = begins(rows, count);
        let of = |(rank, ends): (&u32, &[u32])| {
            let [first, end] = [ends[0], ends[1]].map(|at| at as usize * width);
            (*rank, vec![buffer.slice(first, end - first)])
        };
        self.ranks.iter().zip(begins.windows(2)).map(of).collect()
    }
}

/// Tokens on their way: where those of each source begin, and ids and weights of their choices.
struct Choices {
    starts: Vec<u32>,
    ids: Vec<u32>,
    /// As they lie in memory.
    weights: Vec<u8>,
}

impl Links {
    /// Own tokens and their choices to the ranks that have experts of them, hop by hop; None: there
    /// are no own tokens. A route for each hop.
    pub(crate) fn dispatch(
        &mut self,
        device: &mut Device,
        journey: &Journey,
        own: Option<OwnTokens>,
    ) -> Vec<Route> {
        let Journey { hops, top_k, .. } = journey;
        let ids = own.map_or_else(Vec::new, |own| read(device, own.ids));
        let weights = own.map(|own| read(device, own.weights.reinterpret(DType::U8)));
        let starts = vec![0, (ids.len() / top_k) as u32];
        let mut here = Choices { starts, ids, weights: weights.unwrap_or_default() };
        let mut routes: Vec<Route> = Vec::new();
        for (at, hop) in hops.iter().enumerate() {
            let needs = Needs::of(&here.ids, *top_k, &hop.places, &here.starts[1..]);
            write(device, hop.need.sent, &needs.tokens);
            match at.checked_sub(1).map(|before| hops[before].need) {
                None => write(device, hop.need.back, &needs.back),
                // In this order they go on.
                Some(before) => {
                    let some = needs.back.iter().filter(|row| **row != NO_EXPERT);
                    write(device, before.choices, &some.copied().collect::<Vec<u32>>());
                }
            }
            if journey.back == Back::Sums {
                write(device, hop.need.sums, &needs.sums);
            }
            let Some((rows, came)) = self.send_choices(device, (hop, journey), &needs, &here)
            else {
                return Vec::new();
            };
            routes.push(Route { sent: needs.rows, came: rows });
            here = came;
        }
        if let Some(last) = hops.last() {
            write(device, last.need.starts, &here.starts);
            write(device, journey.ids, &here.ids);
            write(device, journey.weights.reinterpret(DType::U8), &here.weights);
            self.dispatch_rows(device, journey, &routes, (own.map(|own| own.x), last.x));
        }
        routes
    }

    /// Rows of own tokens [T, D] to where the tokens went; those of others become rows of `to`.
    pub(crate) fn dispatch_rows(
        &mut self,
        device: &mut Device,
        journey: &Journey,
        routes: &[Route],
        (own, to): (Option<Buffer>, Buffer),
    ) {
        let (mut from, hops) = (own, &journey.hops);
        for (at, (hop, route)) in hops.iter().zip(routes).enumerate() {
            if self.has_failed() {
                return;
            }
            let (room, dim) = (hop.leaving.rows, hop.dim);
            let rows: usize = route.sent.iter().map(|rows| rows.tokens).sum();
            if let Some(x) = from {
                let (index, y) = (hop.need.sent.slice(0, rows), room.slice(0, rows * dim));
                device.gather_rows(&GatherRows { rows, dim, x, index, y });
            }
            let to = if at + 1 == hops.len() { to } else { hop.x };
            let sends = hop.parcels(&route.sent, |rows| rows.tokens, (room, dim));
            let receives = hop.parcels(&route.came, |rows| rows.tokens, (to, dim));
            self.exchange_as(hop.verb(Verb::Dispatch), device, &sends, &receives);
            from = Some(to);
        }
    }

    /// Rows [D] that the experts here made, of each choice of the tokens here in their order or of
    /// each token, and maybe a number of each choice, to where these came from: what comes lies
    /// where the first hop's tokens left.
    pub(crate) fn bring_back(
        &mut self,
        device: &mut Device,
        journey: &Journey,
        routes: &[Route],
        made: (Buffer, Option<Buffer>),
    ) {
        let Journey { hops, top_k, back, .. } = journey;
        let choices = |rows: &Rows| rows.choices;
        let of = |rows: &Rows| if *back == Back::Sums { rows.tokens } else { rows.choices };
        let mut made = made;
        for (at, (hop, route)) in hops.iter().zip(routes).enumerate().rev() {
            if self.has_failed() {
                return;
            }
            if let (Some(returned), Some(next)) = (hop.returned, hops.get(at + 1)) {
                let rows = route.came.iter().map(choices).sum();
                let index = hop.need.choices.slice(0, rows);
                let gather = |device: &mut Device, dim: usize, x: Buffer, y: Buffer| {
                    let y = y.slice(0, rows * dim);
                    device.gather_rows(&GatherRows { rows, dim, x, index, y });
                };
                match back {
                    Back::Choices => gather(device, hop.dim, next.leaving.rows, returned.rows),
                    Back::Sums => {
                        let tokens = route.came.iter().map(|rows| rows.tokens).sum::<usize>();
                        let pos = next.need.sums.slice(0, tokens * top_k);
                        let out = returned.rows.slice(0, tokens * hop.dim);
                        let (x, top_k, dim) = (next.leaving.rows, *top_k, hop.dim);
                        let accumulate = false;
                        let op = ScatterSum { tokens, top_k, dim, accumulate, x, pos, out };
                        device.scatter_sum(&op);
                    }
                }
                made = (returned.rows, made.1.map(|_| {
                    gather(device, 1, next.leaving.ds, returned.ds);
                    returned.ds
                }));
            }
            let (rows, numbers) = made;
            let mut sends = hop.parcels(&route.came, of, (rows, hop.dim));
            let mut receives = hop.parcels(&route.sent, of, (hop.leaving.rows, hop.dim));
            if let Some(numbers) = numbers {
                let add = |all: &mut Vec<Parcel>, more: Vec<Parcel>| {
                    all.iter_mut().zip(more).for_each(|(all, (_, more))| all.1.extend(more));
                };
                add(&mut sends, hop.parcels(&route.came, choices, (numbers, 1)));
                add(&mut receives, hop.parcels(&route.sent, choices, (hop.leaving.ds, 1)));
            }
            self.exchange_as(hop.verb(Verb::Combine), device, &sends, &receives);
        }
    }

    /// Ids and weights of the tokens that each rank of a hop needs, to it. How many tokens and
    /// choices came from each rank, and these. None: a peer is lost.
    fn send_choices(
        &mut self,
        device: &mut Device,
        (hop, journey): (&Hop, &Journey),
        needs: &Needs,
        here: &Choices,
    ) -> Option<(Vec<Rows>, Choices)> {
        let begun = device.begin_stretch(false);
        let each = WORD + journey.weights.dtype().size();
        let (top_k, sources) = (journey.top_k, here.starts.len() - 1);
        let mut out = needs.messages(here, (top_k, each));
        let most = sources * WORD + hop.x.len() / hop.dim * top_k * each;
        let (mut came, mut bytes) = (None, 0);
        self.attempt(|comm, _| {
            let others = || hop.ranks.iter().zip(&out).enumerate().filter(|(at, _)| *at != hop.me);
            let sends: Vec<(u32, &[u8])> =
                others().map(|(_, (rank, bytes))| (*rank, &bytes[..])).collect();
            bytes = sends.iter().map(|(_, bytes)| bytes.len() as u64).sum();
            let from: Vec<u32> = others().map(|(_, (rank, _))| *rank).collect();
            let mut all = comm.exchange_unequal(&sends, &from, most)?;
            all.insert(hop.me, std::mem::take(&mut out[hop.me]));
            came = Some(hop.read_messages(&all, (top_k, each, sources))?);
            Ok(())
        });
        self.sent(device, begun, (hop.verb(Verb::Dispatch), self.link()), bytes);
        came.filter(|_| !self.has_failed())
    }
}

const WORD: usize = size_of::<u32>();

/// All of a buffer, which a processor has in its memory.
fn read<E: Element + Default>(device: &Device, buffer: Buffer) -> Vec<E> {
    match device.as_cpu() {
        Some(cpu) => cpu.slice(buffer).to_vec(),
        None => device.read_vec(buffer),
    }
}

/// The first elements of a buffer.
fn write<E: Element>(device: &mut Device, buffer: Buffer, values: &[E]) {
    let first = buffer.slice(0, values.len());
    match device.as_cpu_mut() {
        Some(cpu) => cpu.slice_mut(first).copy_from_slice(values),
        None if values.is_empty() => {}
        None => device.write(first, values),
    }
}

impl Needs {
    /// For each rank how many tokens come from each source, then ids and weights of each token, of
    /// `each` bytes a choice.
    fn messages(&self, here: &Choices, (top_k, each): (usize, usize)) -> Vec<Vec<u8>> {
        let width = top_k * (each - WORD);
        let of = |(tokens, sources): (&[u32], &Vec<u32>)| {
            let mut bytes: Vec<u8> = sources.iter().flat_map(|count| count.to_ne_bytes()).collect();
            for token in tokens.iter().map(|token| *token as usize) {
                let ids = &here.ids[token * top_k..][..top_k];
                bytes.extend(ids.iter().flat_map(|id| id.to_ne_bytes()));
                bytes.extend(&here.weights[token * width..][..width]);
            }
            bytes
        };
        self.by_rank().zip(&self.of_sources).map(of).collect()
    }
}

impl Hop<'_> {
    /// Reads the [`Needs::messages`] of each rank.
    fn read_messages(
        &self,
        all: &[Vec<u8>],
        (top_k, each, sources): (usize, usize, usize),
    ) -> Result<(Vec<Rows>, Choices), CommError> {
        let (head, token, room) = (sources * WORD, top_k * each, self.x.len() / self.dim);
        let (mut counts, mut all_tokens): (Vec<Vec<u32>>, u64) = (Vec::new(), 0);
        for (rank, bytes) in self.ranks.iter().zip(all) {
            let heads = bytes.get(..head).unwrap_or_default().as_chunks().0;
            let of: Vec<u32> = heads.iter().map(|word| u32::from_ne_bytes(*word)).collect();
            let tokens: u64 = of.iter().map(|count| u64::from(*count)).sum();
            if bytes.len() as u64 != head as u64 + tokens * token as u64 {
                return Err(CommError::Protocol {
                    rank: *rank,
                    found: format!("{} bytes of choices of {tokens} tokens", bytes.len()),
                    expected: format!("{token} bytes a token behind {sources} counts"),
                });
            }
            all_tokens += tokens;
            if all_tokens > room as u64 {
                return Err(CommError::Protocol {
                    rank: *rank,
                    found: format!("{tokens} tokens, with which {all_tokens} came"),
                    expected: format!("{room} at most"),
                });
            }
            counts.push(of);
        }
        let starts = ends(counts.iter().flatten().copied());
        let (mut ids, mut weights) = (Vec::with_capacity(all_tokens as usize * top_k), Vec::new());
        for bytes in all.iter().flat_map(|bytes| bytes[head..].chunks_exact(token)) {
            let (words, of_token) = bytes.split_at(WORD * top_k);
            ids.extend(words.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)));
            weights.extend(of_token);
        }
        let here = &self.places[self.me];
        let mut rest = &ids[..];
        let of = |counts: &Vec<u32>| {
            let tokens = counts.iter().sum::<u32>() as usize;
            let own = rest.split_off(..tokens * top_k).unwrap_or_default();
            Rows { tokens, choices: own.iter().filter(|id| here.contains(id)).count() }
        };
        let rows = counts.iter().map(of).collect();
        Ok((rows, Choices { starts, ids, weights }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who needs what, as text: the tokens of each rank by source, its choices; where each of these
    /// comes back, and where each sum.
    fn told(ids: &[u32], top_k: usize, places: &[Range<u32>], ends: &[u32]) -> String {
        let needs = Needs::of(ids, top_k, places, ends);
        let of = |((tokens, sources), rows): ((&[u32], &Vec<u32>), &Rows)| {
            assert_eq!(tokens.len(), rows.tokens);
            format!("{tokens:?} of {sources:?}, {}", rows.choices)
        };
        let ranks = needs.by_rank().zip(&needs.of_sources).zip(&needs.rows);
        let ranks: Vec<String> = ranks.map(of).collect();
        let back = |at: &u32| if *at == NO_EXPERT { "-".to_string() } else { at.to_string() };
        let [back, sums] = [&needs.back, &needs.sums].map(|of| {
            of.iter().map(back).collect::<Vec<String>>().join(" ")
        });
        format!("{} | {back} | {sums}", ranks.join("; "))
    }

    #[test]
    fn a_token_goes_once_to_each_rank_that_has_an_expert_of_it() {
        let two = [0..2, 2..4];
        let found = told(&[0, 3, 1, 0, 2, 3], 2, &two, &[3]);
        assert_eq!(found, "[0, 1] of [2], 3; [0, 2] of [2], 3 | 0 3 1 2 4 5 | 0 2 1 - 3 -");
        // A slot without an expert has no row, a rank without an expert no token.
        let (three, none) = ([0..1, 1..1, 1..4], NO_EXPERT);
        let found = told(&[3, none, none, none, 0, 1], 2, &three, &[1, 1, 3]);
        let expected = "[2] of [0, 0, 1], 1; [] of [0, 0, 0], 0; [0, 2] of [1, 0, 1], 2";
        assert_eq!(found, format!("{expected} | 1 - - - 0 2 | 1 - - - 0 2"));
        assert_eq!(told(&[], 2, &two, &[0]), "[] of [0], 0; [] of [0], 0 |  | ");
    }
}
