//! What the verbs of a step send, and the times round them, in steps that are looked at.

use super::{Links, Shared, Way};
use moejob_kernels::{Device, StretchBegun};
use moejob_protocol::communication::{Link, Verb, ring_bytes};

/// The name of a stretch in which the ops wait for a verb that is beside them.
pub(crate) const WAITED: usize = Verb::ALL.len();

/// Of the step that is enqueued.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    asked: bool,
    sent: Sent,
}

/// What was sent in one step, by verb.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sent {
    pub verbs: Vec<OfVerb>,
    /// Bytes of rows that had passed windows before, by verb: how many pass in the step is known
    /// to the device alone, which counts on.
    pub before: WindowRows,
}

/// What one verb has sent by one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OfVerb {
    pub verb: Verb,
    pub link: Link,
    pub bytes: u64,
    pub beside: bool,
}

/// Bytes of rows that passed windows: dispatched, and combined.
pub(crate) type WindowRows = [u64; 2];

impl Sent {
    fn add(&mut self, of: OfVerb) {
        let same = |own: &&mut OfVerb| own.verb == of.verb;
        match self.verbs.iter_mut().find(same) {
            // A verb has one link in an attempt. Of dispatches in chunks that of choices is among
            // the ops, and those of tokens are beside them.
            Some(own) => {
                own.bytes += of.bytes;
                own.beside |= of.beside;
            }
            None => self.verbs.push(of),
        }
    }

    /// With the rows that have passed windows by now.
    pub fn with_rows(mut self, now: WindowRows) -> Sent {
        let passed = |at: usize| now[at].wrapping_sub(self.before[at]);
        for (at, verb) in [Verb::Dispatch, Verb::Combine].into_iter().enumerate() {
            let rows = passed(at);
            let of = |own: &&mut OfVerb| own.verb == verb && own.link == Link::Window;
            self.verbs.iter_mut().filter(|own| of(&own)).for_each(|own| own.bytes += rows);
        }
        self
    }
}

impl Links {
    /// From now on it is written down what verbs send, and they are timed.
    pub(crate) fn look(&mut self, device: &mut Device) {
        let asked = self.comm.world() > 1;
        let before = self.window_rows();
        self.ledger = Ledger { asked, sent: Sent { before, ..Sent::default() } };
        device.time_stretches(asked);
    }

    /// No more; what was sent since. None: nobody looked, or there is nobody to send to.
    pub(crate) fn looked(&mut self, device: &mut Device) -> Option<Sent> {
        device.time_stretches(false);
        let ledger = std::mem::take(&mut self.ledger);
        ledger.asked.then_some(ledger.sent)
    }

    /// See [`Sent::before`]: what is known once the device has come so far.
    pub(crate) fn window_rows(&self) -> WindowRows {
        self.windows.as_ref().map(|windows| windows.rows_passed()).unwrap_or_default()
    }

    /// Whether somebody looks.
    pub(super) fn is_looked_at(&self) -> bool {
        self.ledger.asked
    }

    /// A verb that was begun among the ops, or in a flight of tokens, has sent so many bytes.
    pub(super) fn sent(
        &mut self,
        device: &mut Device,
        begun: StretchBegun,
        (verb, link): (Verb, Link),
        bytes: u64,
    ) {
        device.end_stretch(begun, verb as usize);
        self.write_down(OfVerb { verb, link, bytes, beside: device.is_in_flight() });
    }

    /// By what all that does not go through windows travels.
    pub(super) fn link(&self) -> Link {
        match &self.way {
            Way::Nccl(_) => Link::Nccl,
            Way::Host(_) | Way::Carried(_) => Link::Host,
        }
    }

    /// Bytes that this rank sends of buffers in chunks, whether they are summed or gathered.
    pub(super) fn sends_of(&self, all: &[Shared]) -> u64 {
        if !self.ledger.asked {
            return 0;
        }
        let me = self.comm.rank();
        let chunks = all.iter().filter_map(|shared| Some((shared, shared.chunks(me)?)));
        chunks.map(|(of, chunks)| ring_bytes(of.holders.len(), chunks.own().bytes())).sum()
    }

    pub(super) fn write_down(&mut self, of: OfVerb) {
        if self.ledger.asked {
            self.ledger.sent.add(of);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_add_up_and_windows_add_their_rows() {
        let mut sent = Sent { before: [100, u64::MAX], ..Sent::default() };
        let of = |verb, link, bytes| OfVerb { verb, link, bytes, beside: false };
        sent.add(of(Verb::Dispatch, Link::Window, 7));
        sent.add(of(Verb::SendRecv, Link::Nccl, 50));
        sent.add(of(Verb::Dispatch, Link::Window, 8));
        sent.add(of(Verb::Combine, Link::Nccl, 1));
        let told = sent.with_rows([164, 9]);
        let expected = [
            of(Verb::Dispatch, Link::Window, 79),
            of(Verb::SendRecv, Link::Nccl, 50),
            of(Verb::Combine, Link::Nccl, 1),
        ];
        assert_eq!(told.verbs, expected);
    }
}
