//! Words of a manifest that are those of the protocol: one list, for the schema and as typed.

use moejob_protocol::config::{
    Backend, GradientDtype, MomentDtype, Offload, TokenType, Wire,
};
use moejob_protocol::model::{Activation, AuxLossScope, BalanceLoss, QkNorm, RouterKind, Scoring};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// A value of the protocol, as its JSON is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Word<T>(pub T);

/// What may be typed, in the order of the schema.
pub trait Words {
    const WORDS: &'static [&'static str];
}

macro_rules! words {
    ($($of:ident: $($word:literal)*;)*) => {
        $(impl Words for $of {
            const WORDS: &'static [&'static str] = &[$($word),*];
        })*

        #[cfg(test)]
        mod tests {
            use super::*;

            #[test]
            fn every_word_is_one_of_the_protocols() {
                $(for word in $of::WORDS {
                    let typed = serde_json::from_value::<Word<$of>>((*word).into());
                    assert_eq!(as_typed(typed.expect(word)), *word);
                })*
            }
        }
    };
}

words! {
    Activation: "silu" "gelu" "relu";
    AuxLossScope: "microBatch" "sequence" "global" "hf";
    Backend: "cpu" "cuda";
    BalanceLoss: "switch" "gshard" "firstChoice" "loadImportance" "cvSquared" "kl" "none";
    GradientDtype: "auto" "bf16" "fp32";
    MomentDtype: "fp32" "bf16";
    Offload: "none" "host";
    QkNorm: "none" "perHead" "full";
    RouterKind: "topK" "switch" "gshard" "tutel" "noisyTopK" "topP" "expertChoice" "hash";
    Scoring: "softmax" "sigmoid";
    TokenType: "uint16" "uint32";
    Wire: "auto" "fp32" "bf16" "fp8";
}

impl<T: Words> JsonSchema for Word<T> {
    fn schema_name() -> Cow<'static, str> {
        "Word".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "enum": T::WORDS })
    }
}

/// The word that stands for it in a manifest.
pub fn as_typed(value: impl Serialize) -> String {
    let word = serde_json::to_value(value).ok();
    word.as_ref().and_then(|word| word.as_str()).unwrap_or_default().to_string()
}
