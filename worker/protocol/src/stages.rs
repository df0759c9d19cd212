//! An exchange among the ranks of an expert group in two stages, so that few messages travel
//! between nodes: who sends what to whom (Tutel's 2DH, arXiv 2206.03382, section 3.4).
//!
//! ```text
//! node A: a b        node B: x y          a has pieces for x and y, and so has b
//! within             a --(b's y) <- b     a gets what b has for x, b what a has for y
//! between            a --(a to x, b to x)--> x        b --(a to y, b to y)--> y
//! ```
//! A rank of the own node that passes a piece on is its relay: the one of the place that the
//! receiver has on its own node, counted around where the own node has fewer ranks. What stays
//! within a node goes straight to its receiver in the first stage.
//!
//! Ranks are named by their position in the group. Every rank makes the same plan, from the nodes
//! of all; how many bytes a piece has follows from everybody's choices ([`Flows`]).

/// What one rank of the group has for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    pub from: usize,
    pub to: usize,
}

/// Pieces that travel together, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who it goes to, or comes from.
    pub peer: usize,
    pub pieces: Vec<Piece>,
}

/// What one rank sends and gets in a stage; a message a peer, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stage {
    pub sends: Vec<Message>,
    pub receives: Vec<Message>,
}

/// The nodes of a group.
#[derive(Clone, Debug)]
pub struct Stages {
    /// `[position]`: the node, and the place on it.
    at: Vec<(usize, usize)>,
    /// `[node][place]`: the position.
    nodes: Vec<Vec<usize>>,
}

impl Stages {
    /// `node_of`: by position, any number that is the same for ranks of one node.
    pub fn new(node_of: &[u32]) -> Stages {
        let (mut names, mut nodes) = (Vec::new(), Vec::<Vec<usize>>::new());
        let mut at = Vec::with_capacity(node_of.len());
        for (position, name) in node_of.iter().enumerate() {
            let node = names.iter().position(|known| known == name).unwrap_or(names.len());
            if node == names.len() {
                names.push(*name);
                nodes.push(Vec::new());
            }
            at.push((node, nodes[node].len()));
            nodes[node].push(position);
        }
        Stages { at, nodes }
    }

    /// The rank of the node of `from` that passes its piece for `to` on; `to` itself where it is of
    /// that node.
    pub fn relay(&self, piece: Piece) -> usize {
        let ((near, _), (far, place)) = (self.at[piece.from], self.at[piece.to]);
        let mates = &self.nodes[near];
        if near == far { piece.to } else { mates[place % mates.len()] }
    }

    /// The first stage of `me`: within its node.
    pub fn within(&self, me: usize) -> Stage {
        let mates = || self.mates(me).iter().copied().filter(|mate| *mate != me);
        let all = 0..self.at.len();
        // What `from` gives to `relay`: its piece for that rank, and those to be passed on.
        let pieces = |from: usize, relay: usize| -> Vec<Piece> {
            let pieces = all.clone().map(|to| Piece { from, to });
            pieces.filter(|piece| self.relay(*piece) == relay).collect()
        };
        Stage {
            sends: mates().map(|peer| Message { peer, pieces: pieces(me, peer) }).collect(),
            receives: mates().map(|peer| Message { peer, pieces: pieces(peer, me) }).collect(),
        }
    }

    /// The second stage of `me`: what it passes on to other nodes, and what they pass on to it.
    pub fn between(&self, me: usize) -> Stage {
        let mine = self.at[me].0;
        let sends = (0..self.at.len()).filter(|to| {
            self.at[*to].0 != mine && self.relay(Piece { from: me, to: *to }) == me
        });
        let pieces = |node: usize, to: usize| -> Vec<Piece> {
            self.nodes[node].iter().map(|from| Piece { from: *from, to }).collect()
        };
        let sends = sends.map(|peer| Message { peer, pieces: pieces(mine, peer) }).collect();
        let others = (0..self.nodes.len()).filter(|node| *node != mine);
        let receives = others.map(|node| {
            // All ranks of that node have the same relay for this one.
            let peer = self.relay(Piece { from: self.nodes[node][0], to: me });
            Message { peer, pieces: pieces(node, me) }
        });
        let mut receives: Vec<Message> = receives.collect();
        receives.sort_by_key(|message| message.peer);
        Stage { sends, receives }
    }

    fn mates(&self, me: usize) -> &[usize] {
        &self.nodes[self.at[me].0]
    }
}

/// What goes from whom to whom in one layer of one round, counted from everybody's choices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flows {
    positions: usize,
    /// `[from * positions + to]`: tokens that chose an expert there; each travels once.
    tokens: Vec<usize>,
    /// The same: choices, for each of which a row comes back.
    rows: Vec<usize>,
}

impl Flows {
    /// `sources`: position and tokens of each rank that has some, in the order of `all_ids`
    /// `[tokens, top_k]`; `owner` `[expert]`: the position that computes it. Ids that are none of
    /// an expert travel nowhere.
    pub fn new(
        positions: usize,
        top_k: usize,
        sources: &[(usize, usize)],
        owner: &[u32],
        all_ids: &[u32],
    ) -> Flows {
        let Flows { mut tokens, mut rows, .. } = Flows::none(positions);
        let mut ids = all_ids.chunks_exact(top_k);
        // The last token, counted from 1, that went to each rank.
        let (mut last, mut count) = (vec![0usize; positions], 0);
        for (from, of_source) in sources {
            for ids in ids.by_ref().take(*of_source) {
                count += 1;
                let owners = ids.iter().filter_map(|id| owner.get(*id as usize));
                for to in owners.map(|to| *to as usize) {
                    rows[from * positions + to] += 1;
                    if last[to] != count {
                        tokens[from * positions + to] += 1;
                        last[to] = count;
                    }
                }
            }
        }
        Flows { positions, tokens, rows }
    }

    /// Tokens of `piece.from` that `piece.to` computes.
    pub fn tokens(&self, piece: Piece) -> usize {
        self.tokens[piece.from * self.positions + piece.to]
    }

    /// Rows that come back by `piece`: of tokens of `piece.to`, computed by `piece.from`.
    pub fn rows_back(&self, piece: Piece) -> usize {
        self.rows[piece.to * self.positions + piece.from]
    }

    /// Whether somebody gets more rows or tokens than it has room for, `[position]`: then nothing
    /// travels.
    pub fn overflow(&self, rooms: impl Iterator<Item = (usize, usize)>) -> bool {
        let sum = |of: &[usize], to: usize| -> usize {
            (0..self.positions).map(|from| of[from * self.positions + to]).sum()
        };
        let exceeds = |(to, (rows, tokens)): (usize, (usize, usize))| {
            sum(&self.rows, to) > rows || sum(&self.tokens, to) > tokens
        };
        rooms.enumerate().any(exceeds)
    }

    /// Nothing travels.
    pub fn none(positions: usize) -> Flows {
        let nothing = vec![0; positions * positions];
        Flows { positions, tokens: nothing.clone(), rows: nothing }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// Nodes by the number of their ranks, one behind the other.
    fn nodes(sizes: &[usize]) -> Vec<u32> {
        let of = |(node, size): (usize, &usize)| vec![node as u32; *size];
        sizes.iter().enumerate().flat_map(of).collect()
    }

    fn shapes() -> Vec<Vec<u32>> {
        let mut shapes: Vec<Vec<u32>> = [
            &[1][..], &[4], &[1, 1], &[2, 2], &[4, 4], &[8, 8, 8, 8], &[4, 3], &[3, 4], &[1, 5],
            &[5, 1], &[2, 4, 4, 2], &[1, 2, 3, 4], &[7, 1, 1],
        ]
        .iter()
        .map(|sizes| nodes(sizes))
        .collect();
        // Ranks of a node that do not follow each other.
        shapes.push(vec![7, 3, 7, 3, 3, 9]);
        shapes
    }

    /// Moves what everybody has as the plan says, and looks at who has what.
    #[test]
    fn every_piece_arrives_and_crosses_between_nodes_once() {
        for node_of in shapes() {
            let stages = Stages::new(&node_of);
            let all = 0..node_of.len();
            let own = |from: usize| all.clone().map(|to| Piece { from, to }).collect();
            let mut held: Vec<BTreeSet<Piece>> = all.clone().map(own).collect();
            let mut crossed = BTreeMap::new();
            let plans: [Vec<Stage>; 2] = [
                all.clone().map(|me| stages.within(me)).collect(),
                all.clone().map(|me| stages.between(me)).collect(),
            ];
            for (number, plan) in plans.iter().enumerate() {
                let before = held.clone();
                for (me, Stage { sends, receives }) in plan.iter().enumerate() {
                    let peers: BTreeSet<usize> = sends.iter().map(|message| message.peer).collect();
                    assert!(peers.len() == sends.len() && !peers.contains(&me), "{node_of:?}");
                    for Message { peer, pieces } in sends {
                        let far = node_of[me] != node_of[*peer];
                        assert_eq!(far, number == 1, "{node_of:?}: {me} to {peer}");
                        for piece in pieces {
                            assert!(before[me].contains(piece), "{node_of:?}: {me} has {piece:?}");
                            held[*peer].insert(*piece);
                            *crossed.entry(*piece).or_insert(0) += u32::from(far);
                        }
                        // Who gets it expects the same.
                        let theirs = plan[*peer].receives.iter().find(|got| got.peer == me);
                        assert_eq!(theirs.map(|got| &got.pieces), Some(pieces), "{node_of:?}");
                    }
                    for got in receives {
                        let theirs = plan[got.peer].sends.iter().find(|message| message.peer == me);
                        assert!(theirs.is_some(), "{node_of:?}: {me} waits for {}", got.peer);
                    }
                }
            }
            for to in all.clone() {
                for from in all.clone() {
                    let piece = Piece { from, to };
                    assert!(held[to].contains(&piece), "{node_of:?}: {piece:?}");
                    let far = u32::from(node_of[from] != node_of[to]);
                    assert_eq!(crossed.get(&piece).copied().unwrap_or(0), far, "{node_of:?}");
                }
            }
        }
    }

    #[test]
    fn even_nodes_get_one_message_from_each_other_node() {
        for (count, size) in [(2, 4), (4, 8), (3, 5)] {
            let node_of = nodes(&vec![size; count]);
            let stages = Stages::new(&node_of);
            for me in 0..node_of.len() {
                let between = stages.between(me);
                assert_eq!((between.sends.len(), between.receives.len()), (count - 1, count - 1));
                assert!(between.sends.iter().all(|message| message.pieces.len() == size));
                // Places talk to their own kind alone.
                let place = |position: usize| position % size;
                assert!(between.sends.iter().all(|message| place(message.peer) == place(me)));
                assert_eq!(stages.within(me).sends.len(), size - 1);
            }
        }
    }

    #[test]
    fn a_token_for_several_experts_of_a_rank_is_counted_once() {
        // Experts 0 and 1 are at position 0, 2 at position 1, 3 at position 2; 9 is none.
        let owner = [0, 0, 1, 2];
        let sources = [(0, 2), (2, 1)];
        let flows = Flows::new(3, 2, &sources, &owner, &[0, 1, 2, 9, 3, 0]);
        let at = |from, to| Piece { from, to };
        assert_eq!([flows.tokens(at(0, 0)), flows.rows_back(at(0, 0))], [1, 2]);
        assert_eq!([flows.tokens(at(0, 1)), flows.rows_back(at(1, 0))], [1, 1]);
        assert_eq!([flows.tokens(at(2, 2)), flows.tokens(at(2, 0))], [1, 1]);
        assert_eq!([flows.tokens(at(1, 0)), flows.rows_back(at(0, 1))], [0, 0]);
        // Position 0 computes three rows of two tokens.
        let fits = |rows, tokens| !flows.overflow([(rows, tokens), (1, 1), (1, 1)].into_iter());
        assert_eq!([fits(3, 2), fits(2, 2), fits(3, 1)], [true, false, false]);
        assert_eq!(Flows::none(3).tokens(at(0, 1)), 0);
        assert_eq!(Flows::new(2, 1, &[], &owner, &[]), Flows::none(2));
    }
}
