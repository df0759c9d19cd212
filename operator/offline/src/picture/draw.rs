//! Facts -> SVG, and a page around it. Lengths are in pixels.

use super::scene::{Picture, Scene, Seat};
use crate::page::{STYLE, escaped, page};
use crate::{Outlook, parts};
use moejob_manifest::words::{counted, several};
use moejob_plan::placement::gib;
use std::fmt::Write;

/// A device.
const CELL: u32 = 16;
/// Between devices of two NUMA nodes.
const NUMA_GAP: u32 = 6;
const NODE_HEIGHT: u32 = 58;
const GAP: u32 = 10;
/// Nodes of one leaf that stand beside each other.
const ROW: usize = 8;
const MARGIN: u32 = 20;
const NAME_CHARS_MAX: usize = 18;
const MEMORY_WIDTH: u32 = 720;
/// Parts of memory that are named beside each other.
const NAMED: u32 = 3;
const LINE_HEIGHT: u32 = 20;

/// The picture by itself.
pub fn svg(picture: &Picture) -> String {
    drawn(picture, &format!("<style>{STYLE}</style>\n"))
}

fn drawn(picture: &Picture, style: &str) -> String {
    let (body, width, height) = body(picture);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"picture\" width=\"{width}\" \
         height=\"{height}\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\">\n\
         {style}<rect width=\"100%\" height=\"100%\" class=\"paper\"/>\n{body}</svg>\n"
    )
}

/// A page with all that the plan says, and the picture where a gang can start.
pub fn html(outlook: &Outlook, picture: Option<&Picture>) -> String {
    let parts = parts(outlook);
    let title = parts.first().map_or("", |part| &part.title);
    let mut body = String::new();
    for (at, part) in parts.iter().enumerate() {
        if at > 0 && !part.title.is_empty() {
            let _ = writeln!(body, "<h2>{}</h2>", escaped(&part.title));
        }
        if !part.table.is_empty() {
            let table = part.table.iter().map(|row| escaped(row)).collect::<Vec<_>>().join("\n");
            let _ = writeln!(body, "<div class=\"wide\"><pre>{table}</pre></div>");
        }
        for line in &part.lines {
            let _ = writeln!(body, "<p class=\"told\">{}</p>", escaped(line.trim()));
        }
        // The picture follows the sizes, and all the rest follows the picture.
        if at == 1 && let Some(picture) = picture {
            let _ = write!(
                body,
                "<h2>where each rank runs</h2>\n{}\n<div class=\"wide\">\n{}</div>\n",
                legend(picture),
                drawn(picture, "")
            );
        }
    }
    page(title, "", &body, "")
}

/// The meaning of shapes and colours, with switches for ring and trees where there are any.
fn legend(picture: &Picture) -> String {
    let many = picture.scenes.iter().any(|scene| scene.members > 1);
    let switch = |name: &str, class: &str, label: &str| {
        format!(
            "<label class=\"{class}\"><input type=\"checkbox\" id=\"{name}\" checked>{label}\
             </label> "
        )
    };
    let switches = [
        switch("ring", "ring", "ring"),
        switch("first", "first", "first tree"),
        switch("second", "second", "second tree"),
    ];
    let switches = if many { switches.concat() } else { String::new() };
    let red = if many { "; links between leaves are strong, those of the ring red" } else { "" };
    format!(
        "<p>A box is a node, in the box of its network switch (leaf); dashed are nodes without \
         ranks, red those that are lost. A coloured square is a rank, ranks of one colour share \
         the experts; the mark below it is its network card. Point at a square to see its \
         experts{red}.</p>\n<p>{switches}</p>"
    )
}

/// How a node of this profile looks.
struct Shape {
    width: u32,
    /// Left edge of each device, and of its card if it has one.
    devices: Vec<(u32, bool)>,
    /// Left edge and width of each NUMA node.
    numa: Vec<(u32, u32)>,
}

impl Shape {
    fn of(picture: &Picture) -> Shape {
        let profile = &picture.profile;
        let (mut at, mut devices, mut numa) = (4, Vec::new(), Vec::new());
        // Ranks count devices by PCI address; each stands in the box of its NUMA node.
        let mut all: Vec<&String> = profile.numa.iter().flat_map(|node| &node.gpus).collect();
        all.sort_unstable();
        let known = !all.is_empty() && all.len() == profile.ranks as usize;
        let mut lefts = vec![(0, false); profile.ranks as usize];
        if known {
            for node in &profile.numa {
                let begins = at;
                for (index, gpu) in node.gpus.iter().enumerate() {
                    let device = all.iter().position(|other| *other == gpu).unwrap_or(0);
                    lefts[device] = (at, index < node.hcas.len());
                    at += CELL + 1;
                }
                numa.push((begins - 2, at - begins + 3));
                at += NUMA_GAP + 2;
            }
            devices = lefts;
        } else {
            for _ in 0..profile.ranks {
                devices.push((at, profile.rdma.is_some()));
                at += CELL + 1;
            }
        }
        Shape { width: (at + 2).max(144), devices, numa }
    }
}

fn body(picture: &Picture) -> (String, u32, u32) {
    let shape = Shape::of(picture);
    let mut out = String::new();
    let mut top = MARGIN;
    let profile = &picture.profile;
    let title = format!(
        "MoeJob {} on {}: {} a node, {} a step",
        picture.job,
        profile.name,
        several(profile.ranks, "rank"),
        counted(picture.micro_batches, "micro-batch", "micro-batches")
    );
    text(&mut out, MARGIN, top, " class=\"big\"", &title);
    top += LINE_HEIGHT;
    let mut widest = MEMORY_WIDTH + 200;
    for scene in &picture.scenes {
        top += GAP;
        widest = widest.max(draw_scene(&mut out, scene, &shape, &mut top));
    }
    memory(&mut out, picture, &mut top);
    (out, widest + MARGIN, top + MARGIN)
}

/// One scene; how wide it is.
fn draw_scene(out: &mut String, scene: &Scene, shape: &Shape, top: &mut u32) -> u32 {
    *top += LINE_HEIGHT;
    text(out, MARGIN, *top, " class=\"big\"", &scene.title);
    if let Some(facts) = &scene.facts {
        *top += LINE_HEIGHT;
        text(out, MARGIN, *top, "", &facts.to_string());
    }
    *top += GAP;
    // Runs of one leaf; what has no rank stands in runs of its own.
    let (mut runs, mut begins) = (Vec::new(), 0);
    for at in 1..=scene.seats.len() {
        let ends = at == scene.seats.len()
            || at == scene.members
            || scene.seats[at].leaf.1 != scene.seats[begins].leaf.1;
        if ends {
            runs.push(begins..at);
            begins = at;
        }
    }
    let mut centres = Vec::with_capacity(scene.seats.len());
    let mut widest = 0;
    for run in runs {
        let rows = run.len().div_ceil(ROW) as u32;
        let columns = run.len().min(ROW) as u32;
        let (width, height) = (
            columns * (shape.width + GAP) + GAP,
            rows * (NODE_HEIGHT + GAP) + GAP + 14,
        );
        widest = widest.max(MARGIN + width);
        rect(out, "l", (MARGIN, *top, width, height));
        let first = &scene.seats[run.start];
        let kind = if run.start < scene.members { "leaf" } else { "without ranks, leaf" };
        text(out, MARGIN + GAP, *top + 15, "", &format!("{kind} {}", leaf_name(first)));
        for (place, at) in run.clone().enumerate() {
            let left = MARGIN + GAP + (place % ROW) as u32 * (shape.width + GAP);
            let above = *top + 22 + (place / ROW) as u32 * (NODE_HEIGHT + GAP);
            node(out, scene, shape, at, (left, above));
            centres.push((left + shape.width / 2, above + NODE_HEIGHT / 2));
        }
        *top += height + GAP;
    }
    links(out, scene, &centres);
    widest
}

fn leaf_name(seat: &Seat) -> String {
    match seat.leaf.0.as_str() {
        "" => "without a label".to_string(),
        name => short(name),
    }
}

fn node(out: &mut String, scene: &Scene, shape: &Shape, at: usize, (left, top): (u32, u32)) {
    let seat = &scene.seats[at];
    let class = match (seat.lost, at < scene.members) {
        (true, _) => "gone",
        (false, true) => "n",
        (false, false) => "o",
    };
    rect(out, class, (left, top, shape.width, NODE_HEIGHT));
    text(out, left + 5, top + 15, "", &short(&seat.name));
    for (begins, width) in &shape.numa {
        rect(out, "u", (left + begins, top + 20, *width, CELL + 13));
    }
    let per_node = shape.devices.len() as u32;
    for (device, (begins, has_card)) in (0..).zip(&shape.devices) {
        let x = left + begins;
        let rank = at as u32 * per_node + device;
        let experts = scene.experts.get(rank as usize).filter(|_| at < scene.members);
        let Some([first, last]) = experts else {
            rect(out, "u", (x, top + 23, CELL, CELL));
            continue;
        };
        // Written out, as there are thousands: groups that follow each other differ in colour.
        let hue = rank.checked_div(scene.group).unwrap_or(0) * 137 % 360;
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"{}\" width=\"{CELL}\" height=\"{CELL}\" \
             fill=\"hsl({hue},55%,70%)\"><title>rank {rank}, experts {first}-{last}</title></rect>",
            top + 23
        );
        if *has_card {
            rect(out, "k", (x + 5, top + 42, 6, 4));
        }
    }
}

/// Ring and trees from centre to centre, so that long ones are seen over what lies between.
fn links(out: &mut String, scene: &Scene, centres: &[(u32, u32)]) {
    let members = scene.members;
    let mut line = |class: &str, from: usize, to: usize, bend: i64| {
        let ((x1, y1), (x2, y2)) = (centres[from], centres[to]);
        let across = scene.seats[from].leaf.1 != scene.seats[to].leaf.1;
        let class = if across { format!("{class} x") } else { class.to_string() };
        let middle = ((i64::from(x1) + i64::from(x2)) / 2, (i64::from(y1) + i64::from(y2)) / 2);
        let _ = writeln!(
            out,
            "<path class=\"{class}\" d=\"M{x1} {y1}Q{} {} {x2} {y2}\"/>",
            middle.0 + bend,
            middle.1 + bend
        );
    };
    if members > 1 {
        (0..members).for_each(|at| line("r", at, (at + 1) % members, 0));
    }
    let half = scene.trees.len() / 2;
    for (at, (child, parent)) in scene.trees.iter().enumerate() {
        let (class, bend) = if at < half { ("a", -14) } else { ("b", 14) };
        line(class, *child as usize, *parent as usize, bend);
    }
}

/// A bar of what a rank's memory holds, against what it has.
fn memory(out: &mut String, picture: &Picture, top: &mut u32) {
    let Some(memory) = &picture.memory else { return };
    let has = picture.profile.rank_memory;
    *top += LINE_HEIGHT;
    let limit = has.map_or(String::new(), |has| format!(" of {}", gib(has)));
    let title = format!(
        "memory of rank 0, all are alike: {}{limit} with even routing, {} kept, {} at worst",
        gib(memory.balanced),
        gib(memory.committed),
        gib(memory.worst)
    );
    text(out, MARGIN, *top, "", &title);
    let scale = has.unwrap_or(0).max(memory.committed).max(1);
    let wide = |bytes: u64| {
        (u128::from(bytes) * u128::from(MEMORY_WIDTH) / u128::from(scale)) as u32
    };
    *top += 8;
    rect(out, "u", (MARGIN, *top, MEMORY_WIDTH, 16));
    let (mut left, parts) = (MARGIN, memory.parts.iter().filter(|part| part.bytes > 0));
    for (at, part) in (0..).zip(parts) {
        let (width, fill) = (wide(part.bytes), format!("hsl({},45%,60%)", at * 67 % 360));
        let (name, bytes) = (escaped(part.name), gib(part.bytes));
        let (x, y) = (
            MARGIN + at % NAMED * (MEMORY_WIDTH / NAMED),
            *top + 26 + at / NAMED * LINE_HEIGHT,
        );
        let _ = writeln!(
            out,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"16\" fill=\"{fill}\">\
             <title>{name} {bytes}</title></rect>\n\
             <rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{fill}\"/>\n\
             <text x=\"{}\" y=\"{}\">{name} {bytes}</text>",
            x + 18,
            y + 11
        );
        left += width;
    }
    let named = memory.parts.iter().filter(|part| part.bytes > 0).count() as u32;
    *top += 26 + named.div_ceil(NAMED) * LINE_HEIGHT;
}

fn rect(out: &mut String, class: &str, (x, y, width, height): (u32, u32, u32, u32)) {
    let _ = writeln!(
        out,
        "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"
    );
}

fn text(out: &mut String, x: u32, y: u32, attributes: &str, words: &str) {
    let words = escaped(words);
    let _ = writeln!(out, "<text x=\"{x}\" y=\"{y}\"{attributes}>{words}</text>");
}

fn short(name: &str) -> String {
    match name.chars().count() > NAME_CHARS_MAX {
        // Names of nodes differ at their ends.
        true => {
            let end: Vec<char> = name.chars().rev().take(NAME_CHARS_MAX - 1).collect();
            format!("\u{2026}{}", end.iter().rev().collect::<String>())
        }
        false => name.to_string(),
    }
}
