//! The plan as a picture: what it shows, how large it is, and that names cannot break it.

// It prints how long it took.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use moejob_fabric::topology::NodeInfo;
use moejob_manifest::Job;
use moejob_manifest::keys::Keys;
use moejob_offline::picture::{html, picture, svg};
use moejob_offline::{outlook, text};

fn job(nodes: &str, batch: u32) -> Job {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  nodes: \
         {{ {nodes} }}\n  model: {{ preset: olmoe-1b-7b }}\n  data: {{ train: {{ text: {{ paths: \
         [a] }} }}, sequenceLength: 4096 }}\n  training: {{ steps: 10, globalBatchSize: {batch} \
         }}\n"
    );
    Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

fn nodes(count: usize, leaf: usize, name: impl Fn(usize) -> String) -> Vec<NodeInfo> {
    let node = |at: usize| NodeInfo {
        name: name(at),
        labels: [("ib/torset".to_string(), format!("torset-{}", at / leaf))].into(),
        usable: true,
        ..NodeInfo::default()
    };
    (0..count).map(node).collect()
}

/// Elements as they begin and end, each inside another; none is left open.
fn assert_well_formed(text: &str) {
    let mut open = Vec::new();
    for tag in text.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("a tag ends");
        let name = tag.split([' ', '\n']).next().unwrap();
        let empty = ["meta", "input", "!DOCTYPE"].contains(&name) || tag.ends_with('/');
        match name.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name)),
            None if empty => {}
            None => open.push(name),
        }
    }
    assert_eq!(open, [""; 0]);
}

#[test]
fn it_shows_nodes_devices_cards_ring_and_trees() {
    let job = job("profile: ndm-a100-v4, min: 4", 64);
    let found = picture(&job, Some(&nodes(5, 2, |at| format!("n{at}"))), &Keys::default(), &[]);
    let drawn = svg(&found.unwrap());
    assert_well_formed(&drawn);
    let count = |what: &str| drawn.matches(what).count();
    // Four nodes with a rank on each of eight devices beside its card, and one without ranks.
    assert_eq!((count("<title>rank "), count("class=\"k\"")), (32, 32));
    assert_eq!((count("class=\"n\""), count("class=\"o\"")), (4, 1));
    let links = |class: &str| count(&format!("<path class=\"{class}\""))
        + count(&format!("<path class=\"{class} x\""));
    assert_eq!([links("r"), links("a"), links("b")], [4, 3, 3]);
    // Two leaves of two: the ring crosses twice.
    assert_eq!(count("<path class=\"r x\""), 2);
    for words in ["leaf torset-0", "the ring crosses 2 times", "<title>weights ", "76.0 GiB"] {
        assert!(drawn.contains(words), "{words}");
    }
    // Device 0 is the first by PCI address, which hangs on the second NUMA node.
    let left = |rank: u32| {
        let before = drawn.split(&format!("<title>rank {rank},")).next().unwrap();
        let x = before.rsplit("x=\"").next().unwrap();
        x.split('"').next().unwrap().parse::<u32>().unwrap()
    };
    assert!(left(2) < left(0) && left(0) < left(6) && left(6) < left(4));
}

#[test]
fn a_loss_is_shown_before_and_after() {
    let job = job("profile: ndm-a100-v4, min: 2, max: 2, spares: 1", 64);
    let nodes = nodes(3, 8, |at| format!("n{at}"));
    let found = picture(&job, Some(&nodes), &Keys::default(), &["n0".to_string()]).unwrap();
    let [before, after] = &found.scenes[..] else { panic!("two scenes") };
    let names = |scene: &moejob_offline::picture::Scene| {
        let seats = scene.seats[..scene.members].iter();
        seats.map(|seat| seat.name.clone()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!((names(before), names(after)), ("n0 n1".to_string(), "n2 n1".to_string()));
    let drawn = svg(&found);
    assert_eq!(drawn.matches("class=\"gone\"").count(), 1);
    assert!(drawn.contains("after the loss of n0"));
}

#[test]
fn names_are_words_and_nothing_else() {
    let job = job("profile: ndm-a100-v4, min: 2", 64);
    let evil = ["<script>alert(1)</script>", "a\"onload='x'&b\u{1b}[2J\u{202e}"];
    let mut nodes = nodes(2, 1, |at| evil[at].to_string());
    nodes[0].labels.insert("ib/torset".to_string(), "]]><img src=x>".to_string());
    let found = picture(&job, Some(&nodes), &Keys::default(), &[]).unwrap();
    let told = outlook(&job, Some(&nodes), &Keys::default(), &[]);
    for drawn in [svg(&found), html(&told, Some(&found))] {
        assert_well_formed(&drawn);
        for bad in ["<script", "<img", "\"onload", "\u{1b}", "\u{202e}", "javascript"] {
            assert!(!drawn.contains(bad), "{bad}");
        }
    }
    // Nothing is fetched: the one address is the name of the language.
    let page = html(&told, Some(&found));
    let addresses: Vec<&str> = page.split("http").skip(1).map(|rest| &rest[..12]).collect();
    assert_eq!(addresses, ["-equiv=\"Cont", "://www.w3.or"]);
}

#[test]
fn a_job_without_a_gang_says_so() {
    let job = job("profile: ndm-a100-v4, min: 3", 64);
    let refused = picture(&job, Some(&nodes(2, 1, |at| format!("n{at}"))), &Keys::default(), &[]);
    let refused = refused.err().expect("no picture");
    assert!(refused.starts_with("no gang can start"), "{refused}");
}

/// The first lines of the page's style, then the page, as the words alone are.
fn words(page: &str) -> String {
    let (_, body) = page.split_once("</style>").expect("a style");
    let mut words = String::new();
    for part in body.split('<') {
        words += part.split_once('>').map_or(part, |(_, text)| text);
        words.push('\n');
    }
    words.replace("&#39;", "'").replace("&quot;", "\"").replace("&lt;", "<")
        .replace("&gt;", ">").replace("&amp;", "&")
}

#[test]
fn a_page_has_every_line_of_the_text_and_a_legend() {
    let mut job = job("profile: nd-h200-v5, min: 2", 64);
    job.profile.price = Some(12.5);
    let nodes = nodes(2, 1, |at| format!("n{at}"));
    let told = outlook(&job, Some(&nodes), &Keys::default(), &[]);
    let found = picture(&job, Some(&nodes), &Keys::default(), &[]).unwrap();
    let page = html(&told, Some(&found));
    assert_well_formed(&page);
    let words = words(&page);
    let all = text(&told);
    for line in all.lines().filter(|line| !line.trim().is_empty()) {
        assert!(words.contains(line.trim()), "{line}");
    }
    for legend in ["A box is a node", "first tree", "a step", "weights "] {
        assert!(words.contains(legend), "{legend}");
    }
    for told in ["node-hours", "costs ", "at 12.5 a node and hour", "nd-h100-v5   1 node"] {
        assert!(all.contains(told), "{told} in {all}");
    }
    assert!(page.contains("width=device-width"));
    // A job that cannot start has its words.
    job.nodes.min = 3;
    let told = outlook(&job, Some(&nodes), &Keys::default(), &[]);
    assert!(html(&told, None).contains("nothing starts"));
}

#[test]
fn the_largest_is_small_and_soon_there() {
    let job = job("profile: nd-h200-v5, min: 512", 4096);
    let nodes = nodes(512, 16, |at| format!("aks-ndh200-{at:08}-vmss{at:06}"));
    let began = std::time::Instant::now();
    let found = picture(&job, Some(&nodes), &Keys::default(), &[]).unwrap();
    let drawn = svg(&found);
    let took = began.elapsed();
    println!("{} bytes in {took:?}", drawn.len());
    assert!(drawn.len() < 2 << 20, "{} bytes", drawn.len());
    // The bar is 1 s in a release, on a machine that does nothing else.
    assert!(took.as_secs() < 60, "{took:?}");
}
