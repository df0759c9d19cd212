//! `spec.podTemplate` over a pod of ours, as Kubernetes' strategic merge does it: objects merge
//! field by field, lists of named things merge by their key, other lists are replaced, and a null
//! deletes.

use serde_json::Value;

/// Lists that merge, and the field that names their entries (PodSpec and Container of core/v1).
const KEYS: &[(&str, &str)] = &[
    ("containers", "name"),
    ("volumes", "name"),
    ("env", "name"),
    ("imagePullSecrets", "name"),
    ("resourceClaims", "name"),
    ("volumeMounts", "mountPath"),
    ("ports", "containerPort"),
    ("hostAliases", "ip"),
    ("topologySpreadConstraints", "topologyKey"),
];

/// Lays `overlay` over `base`.
pub fn merge(base: &mut Value, overlay: &Value) {
    let Value::Object(overlay) = overlay else { return };
    for (name, value) in overlay {
        if !base.is_object() {
            *base = Value::Object(Default::default());
        }
        let Value::Object(base) = base else { return };
        match value {
            Value::Null => {
                base.remove(name);
            }
            Value::Object(_) => merge(base.entry(name).or_insert(Value::Null), value),
            Value::Array(items) => {
                let key = KEYS.iter().find(|(list, _)| list == name).map(|(_, key)| *key);
                match (base.get_mut(name), key) {
                    (Some(Value::Array(list)), Some(key)) => merge_lists(list, items, key),
                    _ => {
                        base.insert(name.clone(), value.clone());
                    }
                }
            }
            _ => {
                base.insert(name.clone(), value.clone());
            }
        }
    }
}

/// An entry of the same key is merged in its place, others come at the end.
fn merge_lists(list: &mut Vec<Value>, items: &[Value], key: &str) {
    for item in items {
        match list.iter_mut().find(|other| !item[key].is_null() && other[key] == item[key]) {
            Some(other) => merge(other, item),
            None => list.push(item.clone()),
        }
    }
}
