//! What fails and is tried again, as writes on a full disk: told when it begins and when it is
//! over.

use moe_worker::failure::chain;
use moejob_plan::lead::{WriteError, WriteErrorKind};
use std::collections::BTreeSet;

#[derive(Debug, Default)]
pub struct Stumbles(BTreeSet<&'static str>);

impl Stumbles {
    /// What a person is told of `what`, where its result is news; `then` is what follows of a
    /// failure.
    pub fn news<T, E: std::error::Error + 'static>(
        &mut self,
        what: &'static str,
        result: &Result<T, E>,
        then: &str,
    ) -> Option<String> {
        match result {
            Err(error) if self.0.insert(what) => {
                Some(format!("{what} fails: {}; {then}", chain(error)))
            }
            Ok(_) if self.0.remove(what) => Some(format!("{what} works again")),
            _ => None,
        }
    }
}

/// What this machine has refused may work later.
pub fn unwritten(error: &(dyn std::error::Error + 'static)) -> WriteError {
    WriteError { kind: WriteErrorKind::Other, message: chain(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Error, ErrorKind};

    #[test]
    fn a_failure_is_told_when_it_begins_and_when_it_is_over() {
        let mut stumbles = Stumbles::default();
        let (full, works) = (Err::<(), _>(Error::from(ErrorKind::StorageFull)), Ok(()));
        let mut told = |what, result| stumbles.news(what, result, "it is tried again");
        assert_eq!(told("writing a", &works), None);
        let first = told("writing a", &full).expect("news");
        assert!(first.starts_with("writing a fails: no storage space; it is"), "{first}");
        assert_eq!(told("writing a", &full), None);
        assert!(told("writing b", &full).is_some(), "each by itself");
        assert_eq!(told("writing a", &works).as_deref(), Some("writing a works again"));
        assert!(told("writing a", &full).is_some(), "it begins anew");
    }
}
