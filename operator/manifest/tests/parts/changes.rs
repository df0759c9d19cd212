use moejob_manifest::changes::{changes, put, values};
use serde_json::{Value, json};

#[test]
fn changes_name_the_fields_that_may_not_change() {
    let was = json!({"training": {"steps": 10, "seed": 1}, "nodes": {"min": 1, "max": 2}});
    let is = json!({"training": {"steps": 20, "seed": 2}, "nodes": {"min": 1, "max": 4}});
    let changes = |was: &Value, is: &Value| changes(was, is, &Value::Null);
    assert_eq!(changes(&was, &is), ["training.seed: was 1, is 2"]);
    assert_eq!(
        changes(&is, &was),
        ["training.seed: was 2, is 1", "training.steps: was 20, is 10 (it may only grow)"]
    );
    assert_eq!(changes(&was, &was), [""; 0]);
}

#[test]
fn a_field_that_was_added_since_had_its_default() {
    let was = json!({"model": {"hidden": 8}, "data": [{"paths": ["a"]}]});
    let is = |rope: u32, dtype: &str| {
        let data = json!([{"paths": ["a"], "dtype": dtype}]);
        json!({"model": {"hidden": 8, "rope": rope}, "data": data})
    };
    let defaults = json!({"model": {"hidden": 64, "rope": 5}, "data": [{"dtype": "u16"}]});
    assert_eq!(changes(&was, &is(5, "u16"), &defaults), [""; 0]);
    assert_eq!(changes(&was, &is(6, "u16"), &defaults), ["model.rope: was null, is 6"]);
    let found = changes(&was, &is(5, "u32"), &defaults);
    assert_eq!(found, ["data[0].dtype: was null, is \"u32\""]);
}

#[test]
fn accepted_values_are_put_back() {
    let accepted = json!({"nodes": {"min": 1, "max": 2, "profile": "cpu"}, "suspend": false});
    let mut edited = json!({"nodes": {"min": 9, "profile": "cpu", "spares": 3}, "image": "x",
        "model": {}});
    put(&mut edited, &values(&accepted));
    let expected = json!({"nodes": {"min": 1, "max": 2, "profile": "cpu"}, "suspend": false,
        "training": {}, "checkpoint": {}, "model": {}});
    assert_eq!(edited, expected);
}
