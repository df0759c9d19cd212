//! Which GPUs a container was given, by what its variables say.
//!
//! A device plugin tells the container runtime by `NVIDIA_VISIBLE_DEVICES`, or by CDI, where the
//! variable says `void` or is not there. Either way the driver shows those GPUs alone, and engines
//! take them in its order. The variable chooses nothing here: it names a GPU that should be there
//! and is not, and a part of one, which no engine takes.

use std::sync::OnceLock;

/// What a device plugin tells the container runtime.
pub const ENV_GIVEN: &str = "NVIDIA_VISIBLE_DEVICES";
const ENV_CHOSEN: &str = "CUDA_VISIBLE_DEVICES";

/// Each GPU counts as so many, which ranks share: for tests of a gang on a machine with fewer GPUs.
const ENV_SHARES: &str = "MOEJOB_GPU_SHARES";

/// How many ranks may share a GPU: 1, unless the environment says more.
pub fn shares() -> usize {
    static SHARES: OnceLock<usize> = OnceLock::new();
    let read = || std::env::var(ENV_SHARES).ok()?.parse().ok().filter(|count| *count > 0);
    *SHARES.get_or_init(|| read().unwrap_or(1))
}

/// What the variable says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Given {
    /// It is not there.
    Unsaid,
    All,
    /// `void`, `none` or nothing: the runtime gives none by itself.
    Nothing,
    /// A folder: the runtime reads names of mounts.
    Mounts,
    /// Each once.
    These(Vec<Named>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Named {
    Uuid(String),
    /// Its number on the machine, which no container knows.
    Number(u32),
}

/// What of the variables no engine can do with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotGiven {
    #[error(
        "{variable} names {name}, a part of a GPU (MIG); engines take whole GPUs: switch MIG off, \
         or ask the device plugin for nvidia.com/gpu"
    )]
    Part { variable: &'static str, name: String },
    #[error("{} says {name:?}, which is neither a GPU's uuid nor its number", ENV_GIVEN)]
    Unknown { name: String },
}

impl Given {
    fn parse(said: Option<&str>) -> Result<Given, NotGiven> {
        let Some(said) = said.map(str::trim) else { return Ok(Given::Unsaid) };
        match said {
            "" | "void" | "none" => return Ok(Given::Nothing),
            path if path.starts_with('/') => return Ok(Given::Mounts),
            _ => {}
        }
        let mut these = Vec::new();
        for name in said.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            // As CDI writes it: nvidia.com/gpu=0.
            let device = name.rsplit('=').next().unwrap_or(name);
            if is_part(device) {
                return Err(NotGiven::Part { variable: ENV_GIVEN, name: name.to_owned() });
            }
            let named = match device.parse() {
                _ if device == "all" => return Ok(Given::All),
                Ok(number) => Named::Number(number),
                Err(_) if device.starts_with("GPU-") => Named::Uuid(device.to_owned()),
                Err(_) => return Err(NotGiven::Unknown { name: name.to_owned() }),
            };
            if !these.contains(&named) {
                these.push(named);
            }
        }
        Ok(Given::These(these))
    }
}

/// What the driver calls a part of a GPU: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
///
/// # Errors
/// The name is one.
pub(crate) fn check_name(name: &str) -> Result<(), NotGiven> {
    match name.contains(" MIG ") {
        true => Err(NotGiven::Part { variable: "the driver", name: name.to_owned() }),
        false => Ok(()),
    }
}

/// `MIG-...`, or a GPU's number and that of a part of it: `0:1`.
fn is_part(device: &str) -> bool {
    device.starts_with("MIG-") || device.contains(':')
}

/// The variables of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    given: Option<String>,
    chosen: Option<String>,
}

impl Said {
    pub fn here() -> Said {
        let var = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Said { given: var(ENV_GIVEN), chosen: var(ENV_CHOSEN) }
    }

    fn given(&self) -> Result<Given, NotGiven> {
        let chosen = self.chosen.as_deref().unwrap_or_default();
        if let Some(name) = chosen.split(',').map(str::trim).find(|name| is_part(name)) {
            return Err(NotGiven::Part { variable: ENV_CHOSEN, name: name.to_owned() });
        }
        Given::parse(self.given.as_deref())
    }

    /// Whether engines can take what is given at all.
    ///
    /// # Errors
    /// It names parts of GPUs.
    pub fn check(&self) -> Result<(), NotGiven> {
        match self.given() {
            Err(part @ NotGiven::Part { .. }) => Err(part),
            // A word of a plugin that we do not know: the driver shows what it means.
            Ok(_) | Err(NotGiven::Unknown { .. }) => Ok(()),
        }
    }

    /// ` with CUDA_VISIBLE_DEVICES=3`, for a sentence that says how many GPUs there are; empty
    /// where nothing is said.
    pub fn words(&self) -> String {
        let said = [(ENV_GIVEN, &self.given), (ENV_CHOSEN, &self.chosen)];
        let said = said.into_iter().filter_map(|(name, value)| {
            Some(format!("{name}={}", value.as_ref()?))
        });
        let said: Vec<String> = said.collect();
        if said.is_empty() { String::new() } else { format!(" with {}", said.join(" and ")) }
    }

    /// What the variable of the runtime says beside the GPUs that the driver shows; none where it
    /// is not there.
    ///
    /// # Errors
    /// GPUs that it names are not there.
    pub fn beside(&self, shown: &[String]) -> Option<Result<String, String>> {
        let given = match self.given() {
            Ok(Given::Unsaid) => return None,
            Ok(given) => given,
            Err(error) => return Some(Err(error.to_string())),
        };
        let (said, count) = (self.given.as_deref().unwrap_or_default(), shown.len() / shares());
        let told = |what: &str| Ok(format!("{what}; the driver shows {}", gpus(count)));
        Some(match given {
            Given::Unsaid | Given::All => told("all"),
            Given::Mounts => told(&format!("those mounted at {said}")),
            Given::Nothing if count > 0 => told(&format!("{said:?}: none but by CDI")),
            Given::Nothing => Err(format!(
                "{said:?} gives this container no GPU, nor does CDI: ask for nvidia.com/gpu"
            )),
            Given::These(these) => {
                let missing = self.missing(&these, shown, count);
                let named = format!("{} named", gpus(these.len()));
                match missing.is_empty() {
                    true => told(&named),
                    false => Err(format!(
                        "{named}, and the driver shows {}: {}. The container runtime did not give \
                         it, or it has fallen off the bus (`nvidia-smi -L` on the node)",
                        gpus(count),
                        missing.join(", ")
                    )),
                }
            }
        })
    }

    /// Of those that are named, each that is not shown; nothing where fewer were chosen.
    fn missing(&self, these: &[Named], shown: &[String], count: usize) -> Vec<String> {
        if self.chosen.is_some() {
            return Vec::new();
        }
        let is_shown = |uuid: &str| shown.iter().any(|own| own.eq_ignore_ascii_case(uuid));
        let absent = these.iter().filter_map(|named| match named {
            Named::Uuid(uuid) if !is_shown(uuid) => Some(format!("no {uuid}")),
            _ => None,
        });
        let mut absent: Vec<String> = absent.collect();
        if absent.is_empty() && count < these.len() {
            absent.push(format!("{} missing", these.len() - count));
        }
        absent
    }
}

/// What a sentence about how many GPUs are visible goes on with, such as ` with
/// CUDA_VISIBLE_DEVICES=3`.
pub fn given_words() -> String {
    Said::here().words()
}

fn gpus(count: usize) -> String {
    if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(given: &str) -> Said {
        Said { given: Some(given.to_owned()), chosen: None }
    }

    fn uuids(count: usize) -> Vec<String> {
        (0..count).map(|at| format!("GPU-0000000{at}-aaaa-bbbb-cccc-dddddddddddd")).collect()
    }

    /// What device plugins write: uuids, numbers, words, a folder, names of CDI.
    #[test]
    fn what_a_plugin_gives_is_held_against_the_driver() {
        let eight = uuids(8);
        let list = eight.join(",");
        for (given, shown, expected) in [
            (list.as_str(), 8, "8 GPUs named; the driver shows 8 GPUs"),
            ("0,1,3", 3, "3 GPUs named; the driver shows 3 GPUs"),
            ("0, 0", 1, "1 GPU named; the driver shows 1 GPU"),
            ("all", 8, "all; the driver shows 8 GPUs"),
            ("nvidia.com/gpu=all", 2, "all; the driver shows 2 GPUs"),
            ("nvidia.com/gpu=0,nvidia.com/gpu=1", 2, "2 GPUs named; the driver shows 2 GPUs"),
            ("void", 8, "\"void\": none but by CDI; the driver shows 8 GPUs"),
            ("/var/run/devices", 4, "those mounted at /var/run/devices; the driver shows 4 GPUs"),
        ] {
            let found = said(given).beside(&eight[..shown]);
            assert_eq!(found, Some(Ok(expected.to_owned())), "{given}");
            assert_eq!(said(given).check(), Ok(()), "{given}");
        }
        assert_eq!(Said::default().beside(&eight), None);
        for (given, shown, expected) in [
            (list.as_str(), 7, "8 GPUs named, and the driver shows 7 GPUs: no GPU-00000007-aaaa"),
            ("0,1,2,3", 3, "4 GPUs named, and the driver shows 3 GPUs: 1 missing"),
            ("none", 0, "\"none\" gives this container no GPU"),
            ("", 0, "\"\" gives this container no GPU"),
        ] {
            let told = said(given).beside(&eight[..shown]).expect("said").expect_err(given);
            assert!(told.starts_with(expected), "{told}");
        }
        // Fewer were chosen of them: nothing is missing.
        let chosen = Said { chosen: Some("1".to_owned()), ..said(&list) };
        assert!(chosen.beside(&eight[..1]).is_some_and(|told| told.is_ok()));
        assert!(chosen.words().ends_with(" and CUDA_VISIBLE_DEVICES=1"), "{}", chosen.words());
    }

    #[test]
    fn parts_of_gpus_are_refused_by_name() {
        for name in ["MIG-6fa8-11", "0:1", "nvidia.com/gpu=0:1", "nvidia.com/mig-1g.5gb=MIG-7"] {
            let refused = said(&format!("GPU-1,{name}")).check().expect_err(name).to_string();
            let expected = format!("NVIDIA_VISIBLE_DEVICES names {name}, a part of a GPU (MIG)");
            assert!(refused.starts_with(&expected), "{refused}");
        }
        let driver = check_name("NVIDIA A100-SXM4-40GB MIG 1g.5gb").expect_err("a part");
        assert!(driver.to_string().starts_with("the driver names NVIDIA A100"), "{driver}");
        assert_eq!(check_name("NVIDIA A100-SXM4-40GB"), Ok(()));
        let chosen = Said { given: None, chosen: Some("MIG-6fa8".to_owned()) };
        let refused = chosen.check().expect_err("a part").to_string();
        assert!(refused.starts_with("CUDA_VISIBLE_DEVICES names MIG-6fa8"), "{refused}");
        // A word that nobody knows is told, and the driver's GPUs are taken.
        assert_eq!(said("first").check(), Ok(()));
        let told = said("first").beside(&uuids(1)).expect("said").expect_err("no GPU");
        assert!(told.contains("says \"first\""), "{told}");
    }
}
