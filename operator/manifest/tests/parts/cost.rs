use moejob_manifest::cost::Extent;
use moejob_manifest::identity;
use moejob_protocol::model::{ModelConfig, Role};

fn model(edit: impl Fn(&mut ModelConfig)) -> ModelConfig {
    let mut model = identity::least().model;
    edit(&mut model);
    model
}

#[test]
fn the_extent_is_that_of_the_table() {
    let cases: [&dyn Fn(&mut ModelConfig); 6] = [
        &|_| {},
        &|model| model.num_hidden_layers = 1,
        &|model| (model.num_hidden_layers, model.dense_layers) = (7, vec![0, 3]),
        &|model| model.tie_word_embeddings = true,
        &|model| (model.attention_bias, model.experts.shared) = (true, 2),
        &|model| (model.router.bias, model.dense_layers) = (true, vec![1, 900]),
    ];
    for edit in cases {
        let mut model = model(edit);
        model.dense_intermediate_size = 24;
        let extent = Extent::of(&model);
        let params = model.params();
        let is_expert = |role: &Role| matches!(role, Role::Expert { .. });
        let experts = params.iter().filter(|param| is_expert(&param.role));
        assert_eq!(extent.tensors(), params.len() as u64);
        assert_eq!(model.rows(), params.len() as u64);
        assert_eq!(extent.expert_tensors, experts.clone().count() as u64);
        assert_eq!(extent.expert_elements, experts.map(|of| of.numel()).sum::<u64>());
        assert_eq!(extent.expert_elements + extent.other_elements, model.numel());
    }
}
