//! The sampler against a naive one that sorts everything in f64, and against the distributions that
//! the parameters define.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use super::*;
use pagemill_backend::sampling::{Choice, Draw, RowTask, reference};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

fn request(params: SamplingParams, prompt: &[u32]) -> RequestState {
    RequestState::new(prompt.into(), Arc::new(params))
}

fn draw_one(row: &[f32], request: &RequestState, choice: u32) -> Drawn {
    let mut copy = row.to_vec();
    let mut scratch = RowScratch::default();
    let drawn = sample_row(&mut copy, request, std::iter::once(choice), &mut scratch).pop().unwrap();
    assert_eq!(
        copy.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        row.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    );
    drawn
}

/// The kept tokens with their normalised probabilities, best first, by sorting everything.
fn naive_distribution(row: &[f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Vec<(u32, f64)> {
    let mut logits: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
    for &(id, bias) in &params.logit_bias {
        logits[id as usize] += f64::from(bias);
    }
    for (id, logit) in logits.iter_mut().enumerate() {
        let id = id as u32;
        let count = output.iter().filter(|&&t| t == id).count();
        if prompt.contains(&id) || count > 0 {
            let penalty = f64::from(params.repetition_penalty);
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
        if count > 0 {
            *logit -= f64::from(params.presence_penalty) + f64::from(params.frequency_penalty) * count as f64;
        }
        if output.len() < params.min_tokens && params.stop_token_ids.contains(&id) {
            *logit = f64::from(f32::MIN);
        }
    }
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b)));
    if params.temperature < 1e-5 {
        return vec![(order[0], 1.0)];
    }
    if let Some(k) = params.top_k {
        order.truncate(k as usize);
    }
    let best = logits[order[0] as usize];
    let weight = |id: u32| ((logits[id as usize] - best) / f64::from(params.temperature)).exp();
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    if params.top_p < 1.0 {
        let mut mass = 0.0;
        let mut keep = 0;
        while keep < order.len() && mass < f64::from(params.top_p) * total {
            mass += weight(order[keep]);
            keep += 1;
        }
        order.truncate(keep);
    }
    order.retain(|&id| weight(id) >= f64::from(params.min_p));
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    order.iter().map(|&id| (id, weight(id) / total)).collect()
}

/// A small row whose logits often tie.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    prop_oneof![
        prop::collection::vec(-8.0f32..8.0, 1..400),
        prop::collection::vec((-6i8..6).prop_map(f32::from), 1..400),
        prop::collection::vec(prop_oneof![9 => Just(-3.0f32), 1 => 0.0f32..9.0], 65..1500),
    ]
}

fn params() -> impl Strategy<Value = SamplingParams> {
    (
        0.1f32..3.0,
        prop_oneof![Just(None), (1u32..60).prop_map(Some)],
        prop_oneof![Just(1.0f32), 0.05f32..0.999],
        prop_oneof![Just(0.0f32), 0.0f32..0.6],
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        0usize..4,
    )
        .prop_map(
            |(
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                min_tokens,
            )| {
                SamplingParams {
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    repetition_penalty,
                    presence_penalty,
                    frequency_penalty,
                    min_tokens,
                    ..SamplingParams::default()
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// The inverse of the cumulative distribution, laid out by id, at 64 places: equal to the naive one
    /// except where a place lies within rounding of a boundary.
    #[test]
    fn sampling_equals_the_naive_sampler(
        row in rows(),
        params in params(),
        bias in prop::collection::btree_map(0u32..400, -5.0f32..5.0, 0..4),
        prompt in prop::collection::vec(0u32..400, 1..8),
        output in prop::collection::vec(0u32..400, 0..8),
        seed in any::<u64>(),
    ) {
        let vocab = row.len() as u32;
        let within = |ids: Vec<u32>| ids.into_iter().map(|id| id % vocab).collect::<Vec<u32>>();
        let (prompt, output) = (within(prompt), within(output));
        let bias: BTreeMap<u32, f32> = bias.into_iter().map(|(id, b)| (id % vocab, b)).collect();
        let params = SamplingParams {
            logit_bias: bias.into_iter().collect(),
            stop_token_ids: if vocab > 3 { vec![1, 2] } else { vec![] },
            seed,
            ..params
        };
        let mut by_id = naive_distribution(&row, &params, &prompt, &output);
        by_id.sort_by_key(|&(id, _)| id);
        for choice in 0..64u32 {
            let mut request = request(params.clone(), &prompt);
            for &token in &output {
                request.choice_mut(choice).push(token);
            }
            let token = draw_one(&row, &request, choice).token.unwrap();
            let u = draw::uniform(seed, choice, output.len());
            // A set boundary within rounding may keep one token more or less: the naive neighbourhood.
            let mut mass = 0.0;
            let mut near = Vec::new();
            for &(id, p) in &by_id {
                if mass - 1e-3 <= u && u <= mass + p + 1e-3 {
                    near.push(id);
                }
                mass += p;
            }
            prop_assert!(near.contains(&token) || boundary_is_close(&row, &params, &prompt, &output),
                "token {token} at u = {u}, expected one of {near:?} of {by_id:?}");
        }
    }

    /// What devices give (`pagemill_backend::sampling::reference`) is what is sampled here: equal ranks and likeliest
    /// tokens, log-probabilities within 1e-5, and equal tokens, except that a draw within 1e-6 of a boundary (or a cut
    /// of top_p that 1e-6 moves) may fall on its other side.
    #[test]
    fn devices_sample_as_the_host(
        row in rows(),
        params in params(),
        greedy in prop::bool::weighted(0.1),
        num_top in prop_oneof![Just(None), (0u32..25).prop_map(Some)],
        bias in prop::collection::btree_map(0u32..400, -5.0f32..5.0, 0..4),
        prompt in prop::collection::vec(0u32..400, 1..8),
        output in prop::collection::vec(0u32..400, 0..8),
        seed in any::<u64>(),
    ) {
        let params = SamplingParams {
            temperature: if greedy { 0.0 } else { params.temperature },
            logit_bias: bias.into_iter().collect(),
            stop_token_ids: vec![1, 2],
            logprobs: num_top,
            prompt_logprobs: num_top,
            seed,
            ..params
        };
        for choice in 0..16u32 {
            let mut request = request(params.clone(), &prompt);
            for &token in &output {
                request.choice_mut(choice).push(token);
            }
            let here = draw_one(&row, &request, choice);
            let task = choice_task(0, &request, choice, 0);
            let there = drawn(reference(&row, &task));
            if there.token != here.token {
                let token = here.token.clone().unwrap();
                prop_assert!(nudged(&row, &task).contains(&token), "{here:?}, {there:?}, {task:?}");
                continue;
            }
            prop_assert!(are_close(here.logprobs.as_ref(), there.logprobs.as_ref()), "{here:?}, {there:?}");
            let token = there.token.unwrap();
            let here = prompt_row(&row, token, num_top.unwrap_or(0), &mut RowScratch::default());
            let there = prompt_logprobs(reference(&row, &prompt_task(0, &request, token)));
            prop_assert!(are_close(Some(&here), Some(&there)), "{here:?}, {there:?}");
        }
    }

    /// Greedy takes the best edited logit, the lowest id on ties.
    #[test]
    fn greedy_equals_the_naive_sampler(row in rows(), prompt in prop::collection::vec(0u32..1, 1..2)) {
        let params = SamplingParams::default();
        let want = naive_distribution(&row, &params, &prompt, &[])[0].0;
        for temperature in [0.0, 1e-6, 1e-20, 1e-45, -0.0] {
            let request = request(SamplingParams { temperature, ..params.clone() }, &prompt);
            prop_assert_eq!(draw_one(&row, &request, 0).token.unwrap(), want);
        }
    }

    /// Cuts keep exactly what sorting keeps.
    #[test]
    fn top_k_keeps_what_sorting_keeps(row in rows(), k in 1usize..700) {
        let mut sorted: Vec<Candidate> = (0u32..).zip(&row).map(|(id, &logit)| Candidate { logit, id }).collect();
        sorted.sort_by(select::best_first);
        let cut = top_k_cut(&row, k, &mut Vec::new());
        let kept = (0u32..).zip(&row).filter(|&(id, &x)| cut.keeps(x, id)).count();
        prop_assert_eq!(kept, k.min(row.len()));
        if k < row.len() {
            prop_assert_eq!(cut, sorted[k - 1]);
        }
    }

    /// Log-probabilities against f64, with ranks and the order of the likeliest.
    #[test]
    fn logprobs_equal_the_naive_ones(row in rows(), num_top in 0u32..25, seed in any::<u64>()) {
        let params = SamplingParams { logprobs: Some(num_top), temperature: 1.0, seed, ..SamplingParams::default() };
        let drawn = draw_one(&row, &request(params, &[0]), 0);
        let (token, logprobs) = (drawn.token.unwrap(), drawn.logprobs.unwrap());
        let lse = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        order.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).unwrap().then(a.cmp(&b)));
        prop_assert!((f64::from(logprobs.logprob) - (f64::from(row[token as usize]) - lse)).abs() < 1e-5);
        prop_assert_eq!(order[logprobs.rank as usize - 1], token);
        let top_ids: Vec<u32> = logprobs.top.iter().map(|&(id, _)| id).collect();
        prop_assert_eq!(&top_ids[..], &order[..(num_top as usize).min(row.len())]);
        for (id, logprob) in logprobs.top {
            prop_assert!((f64::from(logprob) - (f64::from(row[id as usize]) - lse)).abs() < 1e-5);
        }
    }
}

/// Tokens of draws that are the task's but for rounding.
fn nudged(row: &[f32], task: &RowTask<'_>) -> Vec<u32> {
    let Choice::Draw(draw) = task.choice else { return Vec::new() };
    let mut tokens = Vec::new();
    for by in [-1e-6, 0.0, 1e-6] {
        for share_by in [-1e-6, 0.0, 1e-6] {
            let top_p = if draw.top_p < 1.0 { (draw.top_p + share_by).clamp(1e-9, 0.999_999_9) } else { 1.0 };
            let draw = Draw { uniform: (draw.uniform + by).clamp(0.0, 1.0 - 1e-12), top_p, ..draw };
            tokens.push(reference(row, &RowTask { choice: Choice::Draw(draw), ..*task }).unwrap().token);
        }
    }
    tokens
}

fn are_close(a: Option<&TokenLogprobs>, b: Option<&TokenLogprobs>) -> bool {
    let near = |a: f32, b: f32| (a - b).abs() < 1e-5;
    match (a, b) {
        (Some(a), Some(b)) => {
            let tops = a.top.iter().zip(&b.top);
            near(a.logprob, b.logprob)
                && (a.rank, a.top.len()) == (b.rank, b.top.len())
                && tops.into_iter().all(|(a, b)| a.0 == b.0 && near(a.1, b.1))
        }
        (a, b) => a == b,
    }
}

/// Whether f32 rounding may move the top_p or min_p boundary, or order two edited logits differently.
fn boundary_is_close(row: &[f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) -> bool {
    let shifted = |by: f32| SamplingParams {
        top_p: if params.top_p < 1.0 { (params.top_p + by).clamp(1e-6, 0.999_999) } else { 1.0 },
        min_p: if params.min_p > 0.0 { params.min_p - by } else { 0.0 },
        ..params.clone()
    };
    let ids = |by: f32| -> Vec<u32> {
        naive_distribution(row, &shifted(by), prompt, output).into_iter().map(|(id, _)| id).collect()
    };
    ids(1e-5) != ids(-1e-5)
}

/// Chi-square of 40,000 draws against the naive distribution (fixed seeds).
#[test]
fn draws_follow_the_distribution() {
    let row: Vec<f32> = (0..300).map(|i| ((i * 37 % 101) as f32) * 0.06).collect();
    let base = SamplingParams { temperature: 0.9, ..SamplingParams::default() };
    let cases = [
        base.clone(),
        SamplingParams { top_k: Some(20), ..base.clone() },
        SamplingParams { top_p: 0.7, ..base.clone() },
        SamplingParams { min_p: 0.2, ..base.clone() },
        SamplingParams { top_k: Some(50), top_p: 0.9, min_p: 0.3, temperature: 1.7, ..base },
    ];
    for params in cases {
        let want = naive_distribution(&row, &params, &[0], &[]);
        let mut request = request(SamplingParams { seed: 77, ..params.clone() }, &[0]);
        let mut seen: BTreeMap<u32, f64> = BTreeMap::new();
        let draws = 40_000;
        for _ in 0..draws {
            let token = draw_one(&row, &request, 0).token.unwrap();
            request.choice_mut(0).push(token);
            *seen.entry(token).or_default() += 1.0;
        }
        assert!(seen.keys().all(|id| want.iter().any(|(kept, _)| kept == id)), "{params:?}: a dropped token was drawn");
        let (mut chi2, mut cells, mut rest) = (0.0, 0.0f64, (0.0, 0.0));
        for (id, p) in &want {
            let (expected, count) = (p * f64::from(draws), seen.get(id).copied().unwrap_or(0.0));
            if expected >= 10.0 {
                chi2 += (count - expected).powi(2) / expected;
                cells += 1.0;
            } else {
                rest = (rest.0 + expected, rest.1 + count);
            }
        }
        if rest.0 >= 10.0 {
            chi2 += (rest.1 - rest.0).powi(2) / rest.0;
            cells += 1.0;
        }
        // Mean `cells - 1`, standard deviation sqrt(2 (cells - 1)); four of them.
        let limit = (cells - 1.0) + 4.0 * (2.0 * (cells - 1.0)).sqrt() + 4.0;
        assert!(chi2 < limit, "{params:?}: chi-square {chi2} over {cells} cells");
    }
}

#[test]
fn seeds_choices_and_positions_have_streams_of_their_own() {
    let row: Vec<f32> = (0..1000).map(|i| (i % 7) as f32 * 0.1).collect();
    let stream = |seed: u64, choice: u32| {
        let mut request = request(SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() }, &[0]);
        (0..32)
            .map(|_| {
                let token = draw_one(&row, &request, choice).token.unwrap();
                request.choice_mut(choice).push(token);
                token
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(stream(42, 0), stream(42, 0));
    assert_ne!(stream(42, 0), stream(43, 0));
    assert_ne!(stream(42, 0), stream(42, 1));
    assert!(stream(42, 0).windows(2).any(|pair| pair[0] != pair[1]));
}

#[test]
fn choices_share_one_row() {
    let row: Vec<f32> = (0..200).map(|i| (i % 13) as f32 * 0.3).collect();
    let params = SamplingParams {
        temperature: 1.0,
        frequency_penalty: 1.5,
        repetition_penalty: 1.2,
        logprobs: Some(3),
        ..SamplingParams::default()
    };
    let mut request = request(params, &[5, 6]);
    request.choice_mut(1).push(12);
    let mut shared = row.clone();
    let together = sample_row(&mut shared, &request, 0..3, &mut RowScratch::default());
    assert_eq!(shared, row);
    let alone: Vec<Drawn> = (0..3).map(|choice| draw_one(&row, &request, choice)).collect();
    assert_eq!(together, alone);
}

#[test]
fn rows_without_a_distribution_fail_alone() {
    let request = request(SamplingParams { logprobs: Some(2), ..SamplingParams::default() }, &[0]);
    for bad in [vec![f32::NAN; 50], vec![f32::NEG_INFINITY; 50], vec![f32::INFINITY; 50]] {
        let drawn = draw_one(&bad, &request, 0);
        assert_eq!(drawn.token, Err("the model produced NaN logits".to_owned()));
        assert_eq!(drawn.logprobs, None);
        assert_eq!(super::drawn(reference(&bad, &choice_task(0, &request, 0, 0))), drawn);
        let unknown = prompt_row(&bad, 3, 2, &mut RowScratch::default());
        assert_eq!(prompt_logprobs(reference(&bad, &prompt_task(0, &request, 3))), unknown);
        assert!(prompt_row(&bad, 3, 2, &mut RowScratch::default()).logprob.is_finite());
    }
    let mut one_nan = vec![0.0; 50];
    one_nan[31] = f32::NAN;
    assert!(draw_one(&one_nan, &request, 0).token.is_err());
}

#[test]
fn banning_everything_still_gives_a_token() {
    let row: Vec<f32> = (0..40).map(|i| i as f32 * 0.1).collect();
    for (bias, temperature) in [(-100.0, 0.0), (-100.0, 1.0), (f32::NEG_INFINITY, 0.0), (f32::NEG_INFINITY, 1.0)] {
        let logit_bias = (0..40).map(|id| (id, bias)).collect();
        let params = SamplingParams { logit_bias, temperature, logprobs: Some(5), ..SamplingParams::default() };
        let drawn = draw_one(&row, &request(params, &[0]), 0);
        assert!(drawn.token.unwrap() < 40);
        let logprobs = drawn.logprobs.unwrap();
        assert!(logprobs.logprob.is_finite() && logprobs.top.iter().all(|(_, l)| l.is_finite()));
    }
    let masked = SamplingParams { min_tokens: 1, stop_token_ids: (0..40).collect(), ..SamplingParams::default() };
    assert_eq!(draw_one(&row, &request(masked, &[0]), 0).token, Ok(0));
}

#[test]
fn impossible_tokens_have_finite_logprobs() {
    let mut row = vec![f32::NEG_INFINITY; 30];
    row[4] = 1.0;
    row[9] = 0.0;
    let params = SamplingParams { logprobs: Some(20), temperature: 1.0, ..SamplingParams::default() };
    let drawn = draw_one(&row, &request(params, &[0]), 0);
    assert!([4, 9].contains(&drawn.token.unwrap()));
    let top = drawn.logprobs.unwrap().top;
    assert_eq!(top.len(), 20);
    assert_eq!((top[0].0, top[1].0, top[2]), (4, 9, (0, -9999.0)));
    assert_eq!(prompt_row(&row, 0, 0, &mut RowScratch::default()).logprob, -9999.0);
}

#[test]
fn stop_tokens_are_masked_until_min_tokens() {
    let mut row = vec![0.0f32; 20];
    row[7] = 9.0;
    row[3] = 5.0;
    let params = SamplingParams { min_tokens: 2, stop_token_ids: vec![7], ..SamplingParams::default() };
    let mut request = request(params, &[0]);
    for want in [3, 3, 7] {
        assert_eq!(draw_one(&row, &request, 0).token, Ok(want));
        request.choice_mut(0).push(want);
    }
}

#[test]
fn huge_and_tiny_parameters_do_no_harm() {
    let row = vec![3.0e38f32, -3.0e38, 0.0, f32::MAX, f32::MIN];
    for temperature in [1e-5, 1e-3, 1.0, f32::MAX] {
        for (top_p, min_p) in [(1.0, 0.0), (f32::MIN_POSITIVE, 0.0), (0.999_999, 1.0)] {
            let params =
                SamplingParams { temperature, top_p, min_p, top_k: Some(u32::MAX), ..SamplingParams::default() };
            assert!(draw_one(&row, &request(params, &[0]), 0).token.unwrap() < 5);
        }
    }
}
