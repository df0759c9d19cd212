//! Lists of processors as the kernel writes them: `0-3,8,10-11`.

/// Processors that Linux can be built for.
pub const CPUS_MAX: u32 = 8192;

/// Ascending, each once; an empty text is an empty list. None where it is no such list.
pub fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u32>().ok()).flatten().filter(|cpu| *cpu < CPUS_MAX)
    };
    let (mut cpus, text) = (Vec::new(), text.trim());
    for range in text.split(',').filter(|_| !text.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || cpus.last().is_some_and(|before| *before >= first) {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// As the kernel would write it; `cpus` ascend.
pub fn cpu_text(cpus: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *cpu => *last = *cpu,
            _ => ranges.push((*cpu, *cpu)),
        }
    }
    let text = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_as_the_kernel_writes_them() {
        assert_eq!(cpu_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(cpu_list("\n"), Some(Vec::new()));
        for wrong in ["3-1", "a", "0-", "0-99999999", "-1", "1,,2", "1,1", "4,2", "+1", "0-3-5"] {
            assert_eq!(cpu_list(wrong), None, "{wrong}");
        }
        for text in ["", "0", "0-1", "0,2", "0-3,8,10-11", "4094-4095,8191"] {
            assert_eq!(cpu_text(&cpu_list(text).expect("a list")), text);
        }
    }
}
