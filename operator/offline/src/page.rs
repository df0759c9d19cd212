//! Pages of HTML have this in common: the style of both schemes of colours, and text that is safe.
//! A page is one file and fetches nothing. Where it has a script, that one alone can run.

use moejob_manifest::problem::printable;
use moejob_protocol::canonical::canonical_hash;
use serde_json::json;

/// For the light and the dark scheme, as the reader's system asks.
pub const STYLE: &str = include_str!("page.css");

/// A page of this title, which is text, and of what stands in it, which is HTML.
pub fn page(title: &str, more_style: &str, body: &str, script: &str) -> String {
    let title = escaped(title);
    // Who writes words that stand in the page cannot know what all of it hashes to.
    let nonce = canonical_hash(&json!([title, body]), &[]);
    let (rule, script) = match script.is_empty() {
        true => (String::new(), String::new()),
        false => (
            format!("; script-src 'nonce-{nonce}'"),
            format!("<script nonce=\"{nonce}\">\n{script}</script>\n"),
        ),
    };
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src \
         'unsafe-inline'{rule}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}{more_style}</style></head><body>\n\
         <h1>{title}</h1>\n{body}{script}</body></html>\n"
    )
}

/// Text as HTML and XML show it, whatever stands in it.
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in printable(text).chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Names and colours of the variables of a scheme.
    fn colours(of: &str) -> BTreeMap<&str, [f64; 3]> {
        let pairs = of.split([';', '{', '}', '\n']).filter_map(|rule| rule.split_once(":#"));
        let channel = |hex: &str, at: usize| {
            f64::from(u8::from_str_radix(&hex[at..at + 2], 16).expect("a colour")) / 255.0
        };
        pairs.map(|(name, hex)| (name.trim(), [0, 2, 4].map(|at| channel(hex, at)))).collect()
    }

    /// The contrast of two colours, as WCAG 2 counts it.
    fn contrast(a: [f64; 3], b: [f64; 3]) -> f64 {
        let luminance = |of: [f64; 3]| -> f64 {
            let linear = of.map(|c| match c {
                c if c <= 0.04045 => c / 12.92,
                c => ((c + 0.055) / 1.055).powf(2.4),
            });
            0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        };
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn text_can_be_read_in_both_schemes() {
        let (light, rest) = STYLE.split_once("@media (prefers-color-scheme:dark)").expect("two");
        let (dark, rest) = rest.split_once("}}").expect("an end");
        let [light, dark] = [light, dark].map(colours);
        assert!(light.len() >= 22 && light.keys().eq(dark.keys()), "{light:?} {dark:?}");
        assert!(!rest.contains(":#"), "colours stand in the schemes alone");
        for scheme in [light, dark] {
            let text = scheme.iter().filter(|(name, _)| {
                ["--ink", "--quiet", "--bad"].contains(name) || name.starts_with("--c")
            });
            for (name, colour) in text {
                for paper in ["--paper", "--panel", "--leaf", "--node"] {
                    let found = contrast(*colour, scheme[paper]);
                    assert!(found >= 4.5, "{name} on {paper}: {found:.2}");
                }
            }
            assert!(contrast(scheme["--ink"], scheme["--lost"]) >= 4.5);
            // These are shapes and no text.
            for name in ["--starting", "--trained", "--again", "--waiting", "--recovering"] {
                let found = contrast(scheme[name], scheme["--paper"]);
                assert!(found >= 3.0, "{name}: {found:.2}");
            }
        }
    }

    #[test]
    fn one_script_may_run_and_names_are_words() {
        let evil = "<script>alert('x')</script>";
        let html = page(evil, "", &escaped(evil), "own();\n");
        assert_eq!(html.matches("<script").count(), 1);
        let nonce = html.split("'nonce-").nth(1).and_then(|rest| rest.split('\'').next());
        assert!(html.contains(&format!("<script nonce=\"{}\">", nonce.expect("a nonce"))));
        assert!(!page("a", "", "b", "").contains("script"));
    }
}
