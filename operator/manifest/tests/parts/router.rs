use moejob_manifest::Job;
use moejob_manifest::devices;
use moejob_protocol::model::BalanceLoss;

fn job(per_token: u32, router: &str) -> Job {
    let text = include_str!("../manifests/base.yaml");
    let text = text.replace("perToken: 2", &format!("perToken: {per_token}"));
    let text = text.replace("hiddenSize: 64", &format!("hiddenSize: 64\n    router: {router}"));
    Job::read(text.as_bytes()).expect("a good manifest")
}

#[test]
fn a_kind_brings_the_defaults_of_its_source() {
    let router = |per_token, text| job(per_token, text).model.router;
    assert!(router(2, "{}").is_plain() && router(2, "{ kind: topK }").is_plain());
    let switch = router(1, "{ kind: switch }");
    assert_eq!((switch.capacity_factor, switch.eval_capacity_factor), (1.25, 2.0));
    assert_eq!((switch.jitter, switch.norm_topk_prob, switch.z_loss_coef), (0.01, false, 0.0));
    // Who sets the capacity sets that of evaluation, unless that is set, too.
    let typed = router(1, "{ kind: switch, capacityFactor: 1.5 }");
    assert_eq!(typed.eval_capacity_factor, 1.5);
    let both = router(1, "{ kind: switch, capacityFactor: 1.5, evalCapacityFactor: 0 }");
    assert_eq!(both.eval_capacity_factor, 0.0);
    assert_eq!(router(2, "{ kind: gshard }").balance_loss, BalanceLoss::Gshard);
    let [one, two] = [1, 2].map(|k| router(k, "{ kind: tutel }").norm_topk_prob);
    assert_eq!((one, two), (false, true), "Tutel norms the weights of several experts");
    let hash = router(2, "{ kind: hash }");
    assert_eq!((hash.balance_loss, hash.aux_loss_coef), (BalanceLoss::None, 0.0));
    let cosine = router(2, "{ cosine: {} }").cosine.expect("a cosine gate");
    assert_eq!((cosine.projection_size, cosine.initial_temperature), (256, 0.5));
}

#[test]
fn gpus_take_every_router() {
    let refused = |router: &str| {
        let job = job(2, router);
        devices::on_one_gpu(&job.model, &job.training).into_iter().map(|of| of.path).next()
    };
    for router in [
        "{ scoring: sigmoid, bias: true, groups: 2 }",
        "{ auxLossScope: sequence }",
        "{ kind: gshard }",
        "{ kind: expertChoice }",
        "{ kind: hash }",
        "{ hysteresis: 0.5, jitter: 0.1 }",
        "{ auxLossScope: global, capacityFactor: 1.5 }",
        "{ auxLossScope: hf }",
        "{ cosine: {} }",
    ] {
        assert_eq!(refused(router), None, "{router}");
    }
    // A lane of a warp for each group.
    let wide = job(2, "{ groups: 2 }");
    let mut model = wide.model.clone();
    (model.experts.count, model.router.groups) = (128, 64);
    let found = devices::on_one_gpu(&model, &wide.training);
    assert_eq!(found[0].path, "spec.model.router.groups", "{found:?}");
}
