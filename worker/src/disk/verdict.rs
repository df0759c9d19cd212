//! What an error of storage means: the one place where errors are told apart.

use rustix::io::Errno;
use std::io::Error;

/// What may be done about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Storage itself failed, or has no room: another try may do.
    Stumbles,
    /// Storage refuses whoever asks: a mistake of a person, or a server that has lost its rights.
    Refuses,
    /// There is nothing of that name.
    Missing,
    /// It is there, and is not what it should be. No try will make it so.
    Broken,
}

/// What storage said by this error.
pub fn verdict(error: &Error) -> Verdict {
    // What this program found wrong by itself has no number.
    let Some(number) = Errno::from_io_error(error) else { return Verdict::Broken };
    match number {
        Errno::NOENT | Errno::NOTDIR => Verdict::Missing,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Verdict::Refuses,
        // A link in a file's place, a folder, a name that no file has, something that is there.
        Errno::LOOP | Errno::ISDIR | Errno::NAMETOOLONG | Errno::INVAL | Errno::NXIO => {
            Verdict::Broken
        }
        _ => Verdict::Stumbles,
    }
}

/// Whether another try may find it well: not that something is missing or is no regular file.
pub fn may_heal(error: &Error) -> bool {
    matches!(verdict(error), Verdict::Stumbles | Verdict::Refuses) || gave_up(error).is_some()
}

/// Why reading or writing was given up that had been tried again for a while.
#[derive(Debug)]
pub struct GaveUp {
    pub source: Error,
    pub seconds: u64,
    /// Nobody waits for it any more.
    pub unwanted: bool,
}

impl std::fmt::Display for GaveUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.seconds {
            0 => write!(f, "{}", self.source),
            seconds => write!(f, "{} (tried again for {seconds} s)", self.source),
        }
    }
}

impl std::error::Error for GaveUp {}

/// Whether it was tried again before it was given up, and how that ended.
pub fn gave_up(error: &Error) -> Option<&GaveUp> {
    error.get_ref()?.downcast_ref()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn what_stumbles_is_told_from_what_is_missing_or_broken() {
        let of = |number: Errno| verdict(&number.into());
        for number in [
            Errno::IO,
            Errno::TIMEDOUT,
            Errno::NOTCONN,
            Errno::HOSTDOWN,
            Errno::HOSTUNREACH,
            Errno::NETDOWN,
            Errno::NETUNREACH,
            Errno::STALE,
            Errno::NOSPC,
            Errno::DQUOT,
            Errno::REMOTEIO,
            Errno::CONNRESET,
            Errno::CONNREFUSED,
            Errno::PIPE,
            Errno::NODEV,
            Errno::NOLINK,
            Errno::AGAIN,
            Errno::BUSY,
            Errno::NOMEM,
            Errno::MFILE,
            Errno::NFILE,
            Errno::SHUTDOWN,
        ] {
            assert_eq!(of(number), Verdict::Stumbles, "{number}");
        }
        assert_eq!([Errno::ACCESS, Errno::PERM, Errno::ROFS].map(of), [Verdict::Refuses; 3]);
        assert_eq!([Errno::NOENT, Errno::NOTDIR].map(of), [Verdict::Missing; 2]);
        assert_eq!([Errno::LOOP, Errno::ISDIR].map(of), [Verdict::Broken; 2]);
        for kind in [ErrorKind::UnexpectedEof, ErrorKind::InvalidData, ErrorKind::Other] {
            assert_eq!(verdict(&kind.into()), Verdict::Broken, "{kind}");
        }
        let gave = GaveUp { source: Errno::IO.into(), seconds: 3600, unwanted: false };
        assert!(may_heal(&Error::other(gave)));
    }
}
