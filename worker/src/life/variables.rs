//! This table says what variables of the environment may be by which one measures or tries. One
//! that is set to anything else is refused before anything begins, and measures nothing by mistake.
//!
//! Those with more to read (`MOEJOB_PEER`, `MOEJOB_BESIDE`, ...) are read, and complained of, where
//! they are used.

use crate::attempt::start::{ENV_FAULT, Wanted};
use crate::engine::step::ENV_DEVICE;
use crate::life::run::engines::ENV_ENGINE;

/// Name, what it may be in words, and whether a text is that.
type Rule = (&'static str, &'static str, fn(&str) -> bool);

const RULES: [Rule; 8] = [
    ("MOEJOB_GPU_SHARES", "a whole number from 1", |text| {
        text.parse::<u32>().is_ok_and(|of| of > 0)
    }),
    ("MOEJOB_STRANDS", "a whole number", |text| text.parse::<u32>().is_ok()),
    (ENV_DEVICE, "the number of a GPU, from 0", |text| text.parse::<usize>().is_ok()),
    ("MOEJOB_LANE", "on or off", |text| ["on", "off"].contains(&text)),
    ("MOEJOB_ROUTED", "grows", |text| text == "grows"),
    ("MOEJOB_CUDA_ARCH", "sm_80 or sm_90", |text| ["sm_80", "sm_90"].contains(&text)),
    (ENV_ENGINE, "thread or process", |text| ["thread", "process"].contains(&text)),
    (ENV_FAULT, "such as illegal@60/1, hang@60/1 or illegal@60/1x3", |text| {
        Wanted::parse(text).is_some()
    }),
];

/// What is wrong with the variables that `get` knows, a line each. An empty one is not set.
pub fn refused(get: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let of = |(name, allowed, is_well): &Rule| {
        let found = get(name).filter(|text| !text.is_empty() && !is_well(text))?;
        Some(format!("{name}: found `{}`; allowed: {allowed}", found.escape_debug()))
    };
    RULES.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_holds_nonsense_is_refused_by_name() {
        let with = |name: &'static str, value: &'static str| {
            refused(move |asked| (asked == name).then(|| value.to_string()))
        };
        for (name, good, bad) in [
            ("MOEJOB_GPU_SHARES", "4", "0"),
            ("MOEJOB_STRANDS", "0", "-1"),
            ("MOEJOB_DEVICE", "0", "gpu0"),
            ("MOEJOB_LANE", "on", "1"),
            ("MOEJOB_ROUTED", "grows", "grow"),
            ("MOEJOB_CUDA_ARCH", "sm_80", "80"),
            (ENV_ENGINE, "thread", "threads"),
            ("MOEJOB_FAULT", "illegal@60/1x3", "illegal@60"),
            ("MOEJOB_FAULT", "hang@60/1", "hangs@60/1"),
        ] {
            assert_eq!(with(name, good), [""; 0], "{name}={good}");
            assert_eq!(with(name, ""), [""; 0], "{name} is not set");
            let told = with(name, bad);
            let expected = format!("{name}: found `{bad}`; allowed: ");
            assert!(told.len() == 1 && told[0].starts_with(&expected), "{told:?}");
        }
        assert_eq!(with("MOEJOB_OTHER", "anything"), [""; 0]);
        let all = refused(|_| Some("\u{1b}".to_string()));
        assert!(all.len() == RULES.len() && all[0].contains("\\u{1b}"), "{all:?}");
    }
}
