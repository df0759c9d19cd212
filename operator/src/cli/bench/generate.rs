//! `moejob bench --preset NAME --generate N`: how fast text of N tokens is generated, by weights as
//! a run begins with them.
//!
//! ```text
//! FIRST tokens -> MEASURED tokens, one by one | up to N - MEASURED together | MEASURED, one by one
//! ```

use super::options::{BenchArgs, DeviceName};
use super::{Refused, device_of, job};
use crate::cli::generate::computer;
use crate::cli::room::{Need, check_alone, largest};
use moe_worker::engine::decode::{DecodeError, Decoder};
use moe_worker::engine::sample::Sampling;
use moe_worker::state::rank::RankState;
use moe_worker::state::snapshot::initialize;
use moejob_manifest::spec::Preset;
use moejob_protocol::config::Precision;
use serde_json::json;
use std::time::Instant;

/// Tokens behind which the first ones are measured.
const FIRST: usize = 64;
/// Tokens that are measured there, and at the end.
const MEASURED: usize = 32;
/// Tokens that make all kernels ready before any is measured.
const READY: usize = 3;
pub const TOKENS_MIN: usize = FIRST + 3 * MEASURED;

/// Tokens a second, and what a token waits for those before it.
struct Speeds {
    /// Of the next token behind [`FIRST`] tokens, and behind the last ones, in seconds.
    tokens: [f64; 2],
    /// Of those that were known, a second.
    prompt: f64,
}

pub fn run(args: &BenchArgs, preset: Preset, tokens: u32) -> Result<(), Refused> {
    let device = device_of(args);
    let model = job(args, preset, device)?.model;
    let precision = match (args.precision.as_deref(), device) {
        (Some("tf32"), _) => Precision::Tf32,
        (Some("fp16"), _) => Precision::Fp16,
        (Some("bf16"), _) | (None, DeviceName::Gpu) => Precision::Bf16,
        _ => Precision::Fp32,
    };
    let refused = |why: String| Refused(2, why);
    let computer =
        computer((device, args.threads), precision, &model, tokens).map_err(refused)?;
    if device == DeviceName::Cpu {
        let wanted = |of: u32| Need::from(&computer.memory_of_generating(&model, of));
        let less = |fits: &dyn Fn(Need) -> bool| {
            let most = largest(TOKENS_MIN as u32, tokens, |of| fits(wanted(of)))?;
            Some(format!("--generate {most} would fit"))
        };
        check_alone("the model", wanted(tokens), less).map_err(refused)?;
    }
    let failed = |error: DecodeError| {
        crate::cli::complain(&error);
        Refused(1, "no text was generated".to_string())
    };
    let mut decoder = Decoder::empty(&model, tokens, computer).map_err(failed)?;
    initialize(decoder.model_mut(), 1);
    decoder.model_mut().finish().map_err(|error| Refused(1, error.to_string()))?;
    let Speeds { tokens: [first, last], prompt } =
        measure(&mut decoder, model.vocab_size, tokens as usize).map_err(failed)?;
    let behind = tokens as usize - MEASURED;
    if args.written.is_json() {
        let line = json!({
            "preset": preset.name(),
            "tokensPerSecond": 1.0 / first,
            "tokensPerSecondAtEnd": 1.0 / last,
            "behind": [FIRST, behind],
            "promptTokensPerSecond": prompt,
        });
        println!("{line}");
        return Ok(());
    }
    println!("{} generates a text of {tokens} tokens", preset.name());
    println!("behind {FIRST:<6}  {:.1} tokens/s, {:.2} ms each", 1.0 / first, 1e3 * first);
    println!("behind {behind:<6}  {:.1} tokens/s, {:.2} ms each", 1.0 / last, 1e3 * last);
    println!("a prompt       {prompt:.0} tokens/s");
    Ok(())
}

fn measure(
    decoder: &mut Decoder,
    vocabulary: u32,
    tokens: usize,
) -> Result<Speeds, DecodeError> {
    let made_up = |from: usize, len: usize| -> Vec<u32> {
        (from..from + len).map(|at| (at * 7919 + 13) as u32 % vocabulary).collect()
    };
    // What is chosen is not what is fed: weights that nobody trained repeat themselves.
    let one_by_one = |decoder: &mut Decoder, count: usize| -> Result<f64, DecodeError> {
        let (ids, began) = (made_up(decoder.len(), count), Instant::now());
        for id in &ids {
            let logits = decoder.feed(&[*id])?;
            std::hint::black_box(Sampling::GREEDY.choose(&logits, 0));
        }
        Ok(began.elapsed().as_secs_f64() / count as f64)
    };
    // Kernels are made ready by what is forgotten again.
    decoder.feed(&made_up(0, FIRST))?;
    one_by_one(decoder, READY)?;
    decoder.feed(&made_up(0, tokens - decoder.len()))?;
    decoder.forget();
    decoder.feed(&made_up(0, FIRST))?;
    let first = one_by_one(decoder, MEASURED)?;
    let known = tokens - MEASURED - decoder.len();
    let began = Instant::now();
    decoder.feed(&made_up(FIRST, known))?;
    let prompt = known as f64 / began.elapsed().as_secs_f64();
    let last = one_by_one(decoder, MEASURED)?;
    Ok(Speeds { tokens: [first, last], prompt })
}
