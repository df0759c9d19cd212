//! What the API server tells an operator: its answers on one connection, of which a list or a watch
//! may come late and an event of a watch may be lost on the way.

/// What is wrong with the operator's view of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Resources (`pods`) whose lists and watches arrive so many milliseconds late.
    pub late: Vec<(String, u64)>,
    /// It is so from the first end of an operator on; else from the beginning.
    pub after_a_cut: bool,
    /// The event of this number of watches of this resource, from 0, is never seen.
    pub unseen: Option<(String, usize)>,
}

/// The events of one watch: an HTTP answer in chunks, whose lines are events as JSON.
#[derive(Default)]
pub struct Events {
    raw: Vec<u8>,
    line: Vec<u8>,
    state: State,
}

#[derive(Default, PartialEq)]
enum State {
    #[default]
    Head,
    Chunks,
    /// No watch: an error with a length of its own.
    Other,
}

impl Events {
    /// What goes on of these bytes: whole events that `keep` wants.
    pub fn pass(&mut self, bytes: &[u8], mut keep: impl FnMut(&[u8]) -> bool) -> Vec<u8> {
        if self.state == State::Other {
            return bytes.to_vec();
        }
        self.raw.extend_from_slice(bytes);
        let mut on = Vec::new();
        if self.state == State::Head {
            let Some(at) = find(&self.raw, b"\r\n\r\n") else { return on };
            let head = self.raw[..at].to_ascii_lowercase();
            if find(&head, b"transfer-encoding: chunked").is_none() {
                self.state = State::Other;
                return std::mem::take(&mut self.raw);
            }
            on.extend(self.raw.drain(..at + 4));
            self.state = State::Chunks;
        }
        while let Some((start, length)) = chunk(&self.raw) {
            if length == 0 {
                // The end of this answer, an empty line after what may follow the last chunk;
                // another answer may follow on the connection.
                let Some(at) = find(&self.raw[start - 2..], b"\r\n\r\n") else { return on };
                on.extend(self.raw.drain(..start + 2 + at));
                self.state = State::Head;
                on.extend(self.pass(&[], keep));
                return on;
            }
            if self.raw.len() < start + length + 2 {
                return on;
            }
            self.line.extend_from_slice(&self.raw[start..start + length]);
            self.raw.drain(..start + length + 2);
            while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.line.drain(..=end).collect();
                if keep(&line) {
                    on.extend(format!("{:x}\r\n", line.len()).bytes());
                    on.extend(line);
                    on.extend(b"\r\n");
                }
            }
        }
        on
    }
}

/// Where the first chunk's bytes begin, and how many they are; None while its head is not there.
fn chunk(raw: &[u8]) -> Option<(usize, usize)> {
    let end = find(raw, b"\r\n")?;
    let text = std::str::from_utf8(&raw[..end]).ok()?;
    Some((end + 2, usize::from_str_radix(text.trim(), 16).ok()?))
}

/// Where `of` begins for the first time; it is not empty.
pub(super) fn find(bytes: &[u8], of: &[u8]) -> Option<usize> {
    bytes.windows(of.len()).position(|window| window == of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_events_are_lost_however_the_bytes_are_cut() {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let whole = format!("{head}2\r\na\n\r\n5\r\nbb\ncc\r\n1\r\n\n\r\n0\r\n\r\n");
        let expected = format!("{head}2\r\na\n\r\n3\r\ncc\n\r\n0\r\n\r\n");
        for size in 1..whole.len() {
            let mut events = Events::default();
            let mut on = Vec::new();
            for part in whole.as_bytes().chunks(size) {
                on.extend(events.pass(part, |line| line != b"bb\n"));
            }
            assert_eq!(String::from_utf8_lossy(&on), expected, "{size}");
        }
    }

    #[test]
    fn two_answers_on_one_connection_are_told_apart() {
        let one = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\na\n\r\n0\r\n\r\n";
        let two = one.repeat(2);
        for size in 1..=two.len() {
            let mut events = Events::default();
            let mut on = Vec::new();
            for part in two.as_bytes().chunks(size) {
                on.extend(events.pass(part, |_| true));
            }
            assert_eq!(String::from_utf8_lossy(&on), two, "{size}");
        }
    }

    #[test]
    fn what_is_no_watch_passes() {
        let text = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\n{}";
        assert_eq!(Events::default().pass(text, |_| false), text);
    }
}
