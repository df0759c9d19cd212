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
fn gpus_refuse_by_name_what_they_lack() {
    let refused = |router: &str| -> Vec<String> {
        let job = job(2, router);
        let lacks = devices::on_one_gpu(&job.model, &job.training).into_iter();
        let of_router = lacks.filter_map(|of| {
            Some(format!("{}: {}", of.path.strip_prefix("spec.model.router.")?, of.found))
        });
        of_router.collect()
    };
    assert_eq!(refused("{ scoring: sigmoid, bias: true, groups: 2 }"), [""; 0]);
    assert_eq!(refused("{ auxLossScope: sequence }"), [""; 0]);
    assert_eq!(refused("{ kind: gshard }"), ["kind: `gshard` on GPUs"]);
    assert_eq!(refused("{ jitter: 0.1 }"), ["jitter: `0.1` on GPUs"]);
    assert_eq!(refused("{ hysteresis: 0.5 }"), ["hysteresis: `0.5` on GPUs"]);
    assert_eq!(refused("{ auxLossScope: global }"), ["auxLossScope: `global` on GPUs"]);
    assert_eq!(refused("{ cosine: {} }"), ["cosine: cosine on GPUs"]);
    // All of them at once; evaluation has the capacity of training.
    assert_eq!(
        refused("{ capacityFactor: 1.5, jitter: 0.1, auxLossScope: global }"),
        [
            "capacityFactor: `1.5` on GPUs",
            "jitter: `0.1` on GPUs",
            "auxLossScope: `global` on GPUs"
        ]
    );
    assert_eq!(
        refused("{ evalCapacityFactor: 2 }"),
        ["evalCapacityFactor: `2.0` on GPUs"]
    );
    let on_cpu = job(2, "{ kind: gshard }").unsupported();
    assert!(on_cpu.is_empty(), "{on_cpu:?}");
}
