//! What was measured of links, beside what a profile expects: as a table and as JSON.

use moe_worker::life::travel::{Call, Found, Link, Reading, Verb, Way, in_units};
use moejob_fabric::travel::Machines;
use moejob_manifest::problem::printable;
use moejob_manifest::profile::{Profile, Profiles};
use moejob_manifest::words::aligned;
use serde_json::{Value, json};

/// Something measured, and what it is compared with.
#[derive(Clone, Copy)]
pub struct Told<'a> {
    pub found: &'a Found,
    /// With figures of its links.
    pub profile: Option<&'a Profile>,
    pub captured: bool,
}

/// How tokens of an expert group go there and back faster, where every rank needs all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    bytes: usize,
    way: Way,
    /// How many times faster than the other way.
    times: f64,
}

/// The profile that is named after these GPUs: of `nd-h200-v5` and `NVIDIA H200` it is `h200`.
pub fn fitting<'a>(profiles: &'a Profiles, gpus: &[String]) -> Option<&'a Profile> {
    let words = |name: &str| -> Vec<String> {
        let name = name.to_ascii_lowercase();
        name.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_string).collect()
    };
    let models: Vec<String> = words(gpus.first()?)
        .into_iter()
        .filter(|word| {
            let digits = word.trim_start_matches(|c: char| c.is_ascii_lowercase());
            digits.len() < word.len() && digits.len() > 1 && digits.parse::<u32>().is_ok()
        })
        .collect();
    let fits = |profile: &&Profile| {
        let named = words(&profile.name);
        profile.links.is_some() && models.iter().any(|model| named.contains(model))
    };
    // Several kinds of GPU in one machine are of no profile.
    let alike = gpus.iter().all(|gpu| *gpu == gpus[0]);
    profiles.names().filter_map(|name| profiles.get(name)).find(fits).filter(|_| alike)
}

/// Seconds that a profile expects of a verb between so many GPUs of one node.
fn expected(profile: &Profile, world: u32, verb: Verb, bytes: usize) -> Option<f64> {
    let figures = profile.links.as_ref()?;
    let here = Machines { gpus_per_node: world, figures };
    let bytes = bytes as f64;
    Some(match verb {
        Verb::AllToAll | Verb::Counts => here.flat(world, bytes),
        Verb::ReduceScatter | Verb::AllGather => here.ring(world, bytes),
        // NCCL's ring does the one and then the other.
        Verb::AllReduce => 2.0 * here.ring(world, bytes),
    })
}

/// By size, where both ways were measured.
fn choices(readings: &[Reading]) -> Vec<Choice> {
    let seconds = |verb: Verb, way: Way, bytes: usize| {
        let is = |reading: &&Reading| reading.call == Call { verb, way, bytes };
        readings.iter().find(is).map(|reading| reading.seconds)
    };
    let there_and_back = |way: Way, bytes: usize| {
        Some(seconds(Verb::AllGather, way, bytes)? + seconds(Verb::ReduceScatter, way, bytes)?)
    };
    let mut sizes: Vec<usize> = readings.iter().map(|reading| reading.call.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let choice = |bytes: usize| {
        let [nccl, windows] = [Way::Nccl, Way::Windows].map(|way| there_and_back(way, bytes));
        let (way, times) = faster(nccl?, windows?);
        Some(Choice { bytes, way, times })
    };
    sizes.into_iter().filter_map(choice).collect()
}

impl Told<'_> {
    fn world(&self) -> u32 {
        self.found.gpus.len() as u32
    }

    /// What a preflight wants of each link, bytes a second.
    fn least(&self) -> Option<f64> {
        Some(self.profile?.expect.get("peerReadGBps")?.fail * 1e9)
    }

    fn expected(&self, verb: Verb, bytes: usize) -> Option<f64> {
        expected(self.profile?, self.world(), verb, bytes)
    }

    pub fn text(&self) -> String {
        let mut text = self.head();
        if !self.found.links.is_empty() {
            text += "\n";
            text += &aligned(&self.link_rows(), 1..3);
            let failed = self.found.links.iter().filter_map(|link| {
                let why = link.rate.as_ref().err()?;
                Some(format!("{}: {}\n", name_of(link), printable(why)))
            });
            text += &failed.collect::<String>();
        }
        text += "\n";
        text += &aligned(&self.verb_rows(), 2..9);
        text + "\n" + &self.choice_text()
    }

    /// What is there, how it was measured, and what the columns are.
    fn head(&self) -> String {
        let Found { gpus, nccl, windows, .. } = self.found;
        let nccl = match nccl {
            Ok(version) => printable(version),
            Err(why) => format!("none: {}", printable(why)),
        };
        let windows = match windows {
            Ok(blocks) => format!("{blocks} blocks at most (MOEJOB_PEER)"),
            Err(why) => format!("none: {}", printable(why)),
        };
        let calls = match self.captured {
            true => "captured into a graph, without what the host takes for each",
            false => "one by one, as engines enqueue them",
        };
        let profile = match self.profile {
            Some(profile) => format!("profile {}", profile.name),
            None => "no profile is named after these GPUs: name one with --profile".to_string(),
        };
        let mut kinds: Vec<(&String, usize)> = Vec::new();
        for gpu in gpus {
            match kinds.iter_mut().find(|(kind, _)| *kind == gpu) {
                Some((_, count)) => *count += 1,
                None => kinds.push((gpu, 1)),
            }
        }
        let kinds = kinds.iter().map(|(kind, count)| format!("{count} x {}", printable(kind)));
        let lines = [
            ("ranks", kinds.collect::<Vec<_>>().join(", ")),
            ("NCCL", nccl),
            ("windows", windows),
            ("calls", calls.to_string()),
            ("expected", profile),
            ("bytes", "of the larger buffer of a rank".to_string()),
            ("GB/s", "of the bus, as nccl-tests counts them".to_string()),
        ];
        lines.iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect()
    }

    fn link_rows(&self) -> Vec<Vec<String>> {
        let heads = ["link", "GB/s", "at least"].map(str::to_string).to_vec();
        let least = self.least().map_or("-".to_string(), gigabytes);
        let row = |link: &Link| {
            let rate = link.rate.as_ref().map_or("-".to_string(), |rate| gigabytes(*rate));
            vec![name_of(link), rate, least.clone()]
        };
        std::iter::once(heads).chain(self.found.links.iter().map(row)).collect()
    }

    /// A row a verb and size.
    fn verb_rows(&self) -> Vec<Vec<String>> {
        let heads = [
            "verb", "bytes", "expected us", "NCCL us", "GB/s", "of it", "windows us", "GB/s",
            "of it", "faster",
        ];
        let mut rows = vec![heads.map(str::to_string).to_vec()];
        let all = &self.found.readings;
        let mut done: Vec<(Verb, usize)> = Vec::new();
        for Reading { call: Call { verb, bytes, .. }, .. } in all {
            if done.contains(&(*verb, *bytes)) {
                continue;
            }
            done.push((*verb, *bytes));
            let of = |way: Way| {
                let call = Call { verb: *verb, way, bytes: *bytes };
                all.iter().find(|reading| reading.call == call)
            };
            let both = [of(Way::Nccl), of(Way::Windows)];
            let expected = self.expected(*verb, *bytes);
            let mut row = vec![verb.name().to_string(), in_units(*bytes)];
            row.push(expected.map_or("-".to_string(), microseconds));
            row.extend(both.iter().flat_map(|reading| self.cells(*reading, expected)));
            row.push(match both {
                [Some(nccl), Some(windows)] => {
                    let (way, times) = faster(nccl.seconds, windows.seconds);
                    format!("{} {times:.2}x", way.name())
                }
                _ => "-".to_string(),
            });
            rows.push(row);
        }
        rows
    }

    /// Time, rate, and which part of the expected rate it is.
    fn cells(&self, reading: Option<&Reading>, expected: Option<f64>) -> [String; 3] {
        let none = || "-".to_string();
        let Some(Reading { call, seconds, .. }) = reading else { return [none(), none(), none()] };
        let rate = call.verb.bus_rate(call.bytes, self.world(), *seconds);
        let part = expected.map_or_else(none, |expected| {
            format!("{:.0}%", 100.0 * expected / seconds)
        });
        [microseconds(*seconds), gigabytes(rate), part]
    }

    fn choice_text(&self) -> String {
        let choices = choices(&self.found.readings);
        if choices.is_empty() {
            return "one way alone was measured, so there is nothing to compare\n"
                .to_string();
        }
        let of = |way: Way| -> Option<String> {
            let here = choices.iter().filter(|choice| choice.way == way);
            let sizes: Vec<String> = here
                .map(|choice| format!("{} ({:.2}x)", in_units(choice.bytes), choice.times))
                .collect();
            (!sizes.is_empty()).then(|| format!("{} at {}", way.name(), sizes.join(", ")))
        };
        let both = [of(Way::Windows), of(Way::Nccl)];
        let both: Vec<String> = both.into_iter().flatten().collect();
        format!(
            "tokens of an expert group there and back (all-gather, reduce-scatter) are faster by\n\
             {}.\nEngines take windows wherever they can be had, unless MOEJOB_PEER=off.\n",
            both.join("; ")
        )
    }

    pub fn json(&self) -> Value {
        let Found { gpus, nccl, windows, links, readings } = self.found;
        let why = |why: &String| json!({ "missing": why });
        let link = |link: &Link| {
            let Link { from, to, rate } = link;
            match rate {
                Ok(rate) => json!({ "from": from, "to": to, "bytesPerSecond": rate }),
                Err(why) => json!({ "from": from, "to": to, "missing": why }),
            }
        };
        let reading = |reading: &Reading| {
            let Reading { call, seconds, fastest, slowest } = reading;
            let expected = self.expected(call.verb, call.bytes);
            json!({
                "verb": call.verb,
                "way": call.way,
                "bytes": call.bytes,
                "seconds": seconds,
                "fastestSeconds": fastest,
                "slowestSeconds": slowest,
                "busBytesPerSecond": call.verb.bus_rate(call.bytes, self.world(), *seconds),
                "expectedSeconds": expected,
                "ofExpected": expected.map(|expected| expected / seconds),
            })
        };
        let choice = |Choice { bytes, way, times }: Choice| {
            json!({ "bytes": bytes, "way": way, "times": times })
        };
        json!({
            "gpus": gpus,
            "nccl": nccl.as_ref().map_or_else(why, |version| json!({ "version": version })),
            "windows": windows.as_ref().map_or_else(why, |blocks| json!({ "blocks": blocks })),
            "captured": self.captured,
            "profile": self.profile.map(|profile| &profile.name),
            "leastBytesPerSecondOfALink": self.least(),
            "links": links.iter().map(link).collect::<Vec<_>>(),
            "readings": readings.iter().map(reading).collect::<Vec<_>>(),
            "auto": choices(readings).into_iter().map(choice).collect::<Vec<_>>(),
        })
    }
}

/// By ranks, which are the GPUs in their order.
fn name_of(link: &Link) -> String {
    format!("{} -> {}", link.from, link.to)
}

fn microseconds(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}

/// Of a second.
fn gigabytes(rate: f64) -> String {
    let rate = rate / 1e9;
    if rate < 10.0 { format!("{rate:.2}") } else { format!("{rate:.0}") }
}

/// By seconds: the way, and how many times faster it is.
fn faster(nccl: f64, windows: f64) -> (Way, f64) {
    match windows < nccl {
        true => (Way::Windows, nccl / windows),
        false => (Way::Nccl, windows / nccl),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(verb: Verb, way: Way, bytes: usize, microseconds: f64) -> Reading {
        let seconds = microseconds / 1e6;
        let call = Call { verb, way, bytes };
        Reading { call, seconds, fastest: 0.9 * seconds, slowest: 1.2 * seconds }
    }

    /// As two H200 were once, in part.
    fn two() -> Found {
        use {Verb::*, Way::*};
        let (small, large) = (1 << 20, 256 << 20);
        Found {
            gpus: vec!["NVIDIA H200".to_string(); 2],
            nccl: Ok("2.28.9".to_string()),
            windows: Ok(32),
            links: vec![
                Link { from: 1, to: 0, rate: Ok(372.4e9) },
                Link { from: 0, to: 1, rate: Err("no peer access".to_string()) },
            ],
            readings: vec![
                reading(AllToAll, Nccl, small, 68.0),
                reading(AllToAll, Windows, small, 9.8),
                reading(AllToAll, Nccl, large, 476.0),
                reading(AllToAll, Windows, large, 434.3),
                reading(AllReduce, Nccl, large, 889.0),
                reading(ReduceScatter, Nccl, small, 60.0),
                reading(ReduceScatter, Windows, small, 12.0),
                reading(ReduceScatter, Nccl, large, 587.0),
                reading(ReduceScatter, Windows, large, 620.0),
                reading(AllGather, Nccl, small, 61.4),
                reading(AllGather, Windows, small, 11.0),
                reading(AllGather, Nccl, large, 548.0),
                reading(AllGather, Windows, large, 540.0),
                reading(Counts, Nccl, 1024, 63.0),
                reading(Counts, Windows, 1024, 5.3),
            ],
        }
    }

    fn h200() -> &'static Profile {
        Profiles::shipped().get("nd-h200-v5").expect("shipped")
    }

    #[test]
    fn a_person_reads_a_table() {
        let told = Told { found: &two(), profile: Some(h200()), captured: false };
        let expected = "\
ranks     2 x NVIDIA H200
NCCL      2.28.9
windows   32 blocks at most (MOEJOB_PEER)
calls     one by one, as engines enqueue them
expected  profile nd-h200-v5
bytes     of the larger buffer of a rank
GB/s      of the bus, as nccl-tests counts them

link    GB/s  at least
1 -> 0   372       335
0 -> 1     -       335
0 -> 1: no peer access

verb            bytes    expected us  NCCL us  GB/s  of it  windows us  GB/s  of it  faster
all-to-all      1 MiB           11.6     68.0  7.71    17%         9.8    53   118%  windows 6.94x
all-to-all      256 MiB        476.1    476.0   282   100%       434.3   309   110%  windows 1.10x
all-reduce      256 MiB       1133.3    889.0   302   127%           -     -      -  -
reduce-scatter  1 MiB           10.2     60.0  8.74    17%        12.0    44    85%  windows 5.00x
reduce-scatter  256 MiB        566.7    587.0   229    97%       620.0   216    91%  NCCL 1.06x
all-gather      1 MiB           10.2     61.4  8.54    17%        11.0    48    92%  windows 5.58x
all-gather      256 MiB        566.7    548.0   245   103%       540.0   249   105%  windows 1.01x
counts          1 KiB            6.2     63.0  0.01    10%         5.3  0.10   117%  windows 11.89x

tokens of an expert group there and back (all-gather, reduce-scatter) are faster by
windows at 1 MiB (5.28x); NCCL at 256 MiB (1.02x).
Engines take windows wherever they can be had, unless MOEJOB_PEER=off.
";
        let text = told.text();
        assert!(text == expected, "{text}");
    }

    #[test]
    fn what_is_missing_says_why() {
        let mut found = two();
        found.nccl = Err("ranks that share a GPU have no communicator".to_string());
        found.links = Vec::new();
        found.readings.retain(|reading| reading.call.way == Way::Windows);
        let told = Told { found: &found, profile: None, captured: true };
        let text = told.text();
        let row = "all-to-all      1 MiB              -        -     -      -         9.8    53";
        assert!(text.contains(&format!("{row}      -  -\n")), "{text}");
        for line in [
            "NCCL      none: ranks that share a GPU have no communicator\n",
            "calls     captured into a graph, without what the host takes for each\n",
            "expected  no profile is named after these GPUs: name one with --profile\n",
            "\none way alone was measured, so there is nothing to compare\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(!text.contains("link"), "{text}");
        let json = told.json();
        assert_eq!(json["nccl"]["missing"], "ranks that share a GPU have no communicator");
        assert_eq!((&json["profile"], &json["auto"]), (&Value::Null, &json!([])));
        assert_eq!(json["readings"][0]["expectedSeconds"], Value::Null);
    }

    #[test]
    fn programs_read_every_number() {
        let json = Told { found: &two(), profile: Some(h200()), captured: false }.json();
        assert_eq!(json["nccl"], json!({ "version": "2.28.9" }));
        assert_eq!(json["windows"], json!({ "blocks": 32 }));
        assert_eq!(json["profile"], "nd-h200-v5");
        assert_eq!(json["leastBytesPerSecondOfALink"], 335e9);
        assert_eq!(json["links"][1], json!({ "from": 0, "to": 1, "missing": "no peer access" }));
        let first = &json["readings"][0];
        assert_eq!(first["verb"], "all-to-all");
        assert_eq!((&first["way"], &first["bytes"]), (&json!("nccl"), &json!(1 << 20)));
        let number = |name: &str| first[name].as_f64().expect(name);
        let rate = f64::from(1 << 19) / 68e-6;
        assert!((number("busBytesPerSecond") / rate - 1.0).abs() < 1e-9, "{first}");
        let part = number("expectedSeconds") / number("seconds");
        assert!((number("ofExpected") / part - 1.0).abs() < 1e-9, "{first}");
        assert!(number("fastestSeconds") < number("seconds"), "{first}");
        let ways: Vec<&Value> =
            json["auto"].as_array().expect("choices").iter().map(|of| &of["way"]).collect();
        assert_eq!(ways, ["windows", "nccl"]);
    }

    #[test]
    fn both_ways_of_tokens_count_for_a_choice() {
        let choices = |readings: &[Reading]| -> Vec<(usize, Way)> {
            choices(readings).iter().map(|choice| (choice.bytes, choice.way)).collect()
        };
        let mut all = two().readings;
        assert_eq!(choices(&all), [(1 << 20, Way::Windows), (256 << 20, Way::Nccl)]);
        // What windows win in one direction they may lose in the other.
        all.retain(|reading| reading.call.verb != Verb::ReduceScatter);
        assert_eq!(choices(&all), []);
        let same = |way| [Verb::AllGather, Verb::ReduceScatter].map(|verb| {
            reading(verb, way, 512, 7.0)
        });
        let even = [same(Way::Nccl), same(Way::Windows)].concat();
        assert_eq!(choices(&even), [(512, Way::Nccl)], "what is there already stays");
    }

    #[test]
    fn a_profile_is_found_by_the_name_of_the_gpus() {
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
            fitting(Profiles::shipped(), &names).map(|profile| profile.name.as_str())
        };
        assert_eq!(of(&["NVIDIA H200"; 2]), Some("nd-h200-v5"));
        assert_eq!(of(&["NVIDIA H100 80GB HBM3"; 8]), Some("nd-h100-v5"));
        assert_eq!(of(&["NVIDIA A100-SXM4-80GB"; 8]), Some("nd-a100-v4"));
        for unknown in [&["NVIDIA L4", "NVIDIA L4"], &["NVIDIA H200", "NVIDIA H100"], &["v5", ""]] {
            assert_eq!(of(unknown), None, "{unknown:?}");
        }
        assert_eq!(of(&[]), None);
    }
}
