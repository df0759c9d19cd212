//! A number that is not finite is traced to where it began.

mod common;

use moe_worker::engine::forward::Pass;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::round::{Aim, Round};
use moe_worker::state::snapshot::initialize;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;

const TOKENS: usize = 16;

/// The model with one weight broken, after a forward pass.
fn broken(name: &str, element: usize) -> (Model, Round) {
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let config = common::model();
    let mut model = Model::new(&config, &layout, 0, &common::training(), 1).expect("an arena");
    initialize(&mut model, 1);
    if let Some(index) = model.params.iter().position(|param| param.name == name) {
        let weight = model.weight(index).expect("one rank holds everything");
        model.device.write(weight.slice(element, 1), &[f32::INFINITY]);
    }
    let ids: Vec<u32> = (0..TOKENS as u32).map(|at| at * 7 % 256).collect();
    model.load(&ids, &ids);
    let round = Round { aim: Aim::Activations, ..Round::alone(TOKENS) };
    Pass::new(&mut model, &mut Links::solo(), &round).forward();
    (model, round)
}

#[test]
fn the_first_place_is_named() {
    let cases = [
        ("model.embed_tokens.weight", 7 * 16, "the embeddings"),
        ("model.layers.0.self_attn.v_proj.weight", 3, "the attention of layer 0"),
        ("model.layers.1.mlp.gate.weight", 5, "the router of layer 1"),
        ("model.layers.1.mlp.experts.2.up_proj.weight", 5, "expert 2 of layer 1"),
        ("model.layers.0.mlp.experts.1.down_proj.weight", 5, "the feed-forward part of layer 0"),
        ("model.norm.weight", 0, "the logits"),
    ];
    for (name, element, expected) in cases {
        let (mut model, round) = broken(name, element);
        assert_eq!(model.broken_activation(&round).as_deref(), Some(expected), "{name}");
        let weight = model.broken_weight().expect("a broken weight");
        assert!(weight.contains(name), "{weight}");
        assert!(weight.ends_with(&format!("at element {element}")), "{weight}");
        Pass::new(&mut model, &mut Links::solo(), &round).loss(None);
        assert!(!model.read_loss().is_finite(), "{name}");
    }
}

#[test]
fn an_expert_is_named_with_its_layer() {
    let (model, _) = broken("model.layers.1.mlp.experts.2.up_proj.weight", 0);
    let said = model.broken_weight().expect("a broken weight");
    assert!(said.contains("(expert 2 of layer 1)"), "{said}");
    let (model, _) = broken("none", 0);
    assert_eq!(model.broken_weight(), None);
}
