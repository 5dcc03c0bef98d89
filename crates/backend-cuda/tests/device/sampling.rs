//! Sampling on the device against its reference: equal tokens, ranks, sums and likeliest tokens, no tolerance.

use crate::support::{ACTIVATIONS, Random, gpu, host, tensor};
use pagemill_backend::sampling::{Choice, Draw, LogitEdits, RowOutcome, RowTask, exp_neg, reference};
use pagemill_backend::{Backend, Tensor};

pub(crate) fn sample(gpu: &dyn Backend, logits: &Tensor, tasks: &[RowTask<'_>]) -> Vec<Option<RowOutcome>> {
    let mut outcomes = vec![Some(RowOutcome { token: 7, report: None })];
    assert!(gpu.sample_rows(logits, tasks, &mut outcomes).unwrap());
    outcomes
}

/// A row of each kind: like a model's, with ties, all alike, flat, steep, with the impossible, without a distribution.
pub(crate) fn task_rows(random: &mut Random, cols: usize) -> Vec<Vec<f32>> {
    let normal = random.normal(cols);
    let scaled = |by: f32| normal.iter().map(|x| x * by).collect::<Vec<f32>>();
    let mut rows = vec![scaled(2.5), scaled(0.01), scaled(40.0), vec![-3.25; cols]];
    rows.push((0..cols).map(|_| random.below(9) as f32 - 4.0).collect());
    rows.push((0..cols).map(|_| if random.below(2) == 0 { 0.0 } else { -0.0 }).collect());
    rows.push(normal.iter().map(|&x| if x < 0.3 { f32::NEG_INFINITY } else { x }).collect());
    rows.push(normal.iter().map(|&x| if x < 0.8 { f32::MIN } else { f32::MAX * x.min(1.0) }).collect());
    let mut one_left = vec![f32::NEG_INFINITY; cols];
    one_left[cols / 2] = -5.0;
    rows.push(one_left);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut row = scaled(1.0);
        row[cols - 1] = bad;
        rows.push(row);
    }
    rows.push(vec![f32::NEG_INFINITY; cols]);
    rows
}

/// The lists of one task's edits.
struct Lists {
    bias: Vec<(u32, f32)>,
    prompt: Vec<u32>,
    counts: Vec<(u32, u32)>,
    masked: Vec<u32>,
    penalties: [f32; 3],
}

fn distinct(random: &mut Random, count: usize, cols: usize) -> Vec<u32> {
    // One more than there is: such ids are passed over.
    let mut ids: Vec<u32> = (0..count).map(|_| random.below(cols + 1) as u32).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn lists(random: &mut Random, cols: usize) -> Lists {
    let biases = [-100.0, 2.5, f32::NEG_INFINITY, f32::MAX, -0.75];
    let bias = distinct(random, 5, cols).into_iter().map(|id| (id, biases[random.below(5)])).collect();
    let repetition = [1.0, 1.3, 0.7][random.below(3)];
    let length = [3, 40, 3000][random.below(3)];
    let prompt = if repetition == 1.0 { Vec::new() } else { distinct(random, length, cols) };
    let counts = distinct(random, 30, cols).into_iter().map(|id| (id, 1 + random.below(4) as u32)).collect();
    let masked = if random.below(2) == 0 { Vec::new() } else { distinct(random, 3, cols) };
    let penalties = [repetition, [0.0, 0.6][random.below(2)], [0.0, -0.4, 0.3][random.below(3)]];
    Lists { bias, prompt, counts, masked, penalties }
}

fn edits(lists: &Lists) -> LogitEdits<'_> {
    LogitEdits {
        bias: &lists.bias,
        repetition_penalty: lists.penalties[0],
        prompt_ids: &lists.prompt,
        output_counts: &lists.counts,
        presence_penalty: lists.penalties[1],
        frequency_penalty: lists.penalties[2],
        masked: &lists.masked,
    }
}

fn uniform(random: &mut Random) -> f64 {
    match random.below(8) {
        0 => 0.0,
        1 => 1.0 - f64::EPSILON / 2.0,
        _ => (random.next() >> 11) as f64 / (1_u64 << 53) as f64,
    }
}

fn draw(random: &mut Random) -> Draw {
    Draw {
        inv_temperature: [1.0, 1.0 / 0.7, 1.0 / 3.0, 1e5, 1.0 / f32::MAX][random.below(5)],
        top_k: [None, None, Some(1), Some(2), Some(50), Some(1000), Some(40_000), Some(0), Some(u32::MAX)]
            [random.below(9)],
        top_p: [1.0, 1.0, 0.9, 0.5, 0.999_999, f32::MIN_POSITIVE][random.below(6)],
        min_p: [0.0, 0.0, 0.02, 0.5, 1.0][random.below(5)],
        uniform: uniform(random),
    }
}

fn task<'a>(random: &mut Random, row: usize, lists: &'a Lists, cols: usize) -> RowTask<'a> {
    let choice = match random.below(8) {
        0 => Choice::Given(random.below(cols) as u32),
        1 => Choice::Largest,
        _ => Choice::Draw(draw(random)),
    };
    let is_edited = random.below(2) == 0 && !matches!(choice, Choice::Given(_));
    let edits = if is_edited { edits(lists) } else { LogitEdits::default() };
    RowTask { row, choice, edits, num_top: [None, None, Some(0), Some(1), Some(20), Some(32)][random.below(6)] }
}

#[test]
fn tasks_give_what_the_reference_gives() {
    let Some(gpu) = gpu(ACTIVATIONS[1]) else { return };
    for (cols, num_tasks) in [(1, 100), (7, 400), (300, 800), (1025, 600), (32_000, 200), (128_256, 90), (262_144, 50)]
    {
        let mut random = Random::new(cols as u64);
        let rows = task_rows(&mut random, cols);
        let all: Vec<Lists> = (0..num_tasks).map(|_| lists(&mut random, cols)).collect();
        let tasks: Vec<RowTask<'_>> =
            all.iter().enumerate().map(|(idx, lists)| task(&mut random, idx % rows.len(), lists, cols)).collect();
        let logits = tensor(&gpu, rows.len(), cols, &rows.concat());
        let outcomes = sample(&gpu, &logits, &tasks);
        assert_eq!(outcomes.len(), tasks.len());
        for (task, outcome) in tasks.iter().zip(&outcomes) {
            assert_eq!(*outcome, reference(&rows[task.row], task), "{cols} columns, {task:?}");
        }
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_none()).count() > 0, num_tasks > 9);
        assert_eq!(sample(&gpu, &logits, &tasks), outcomes, "{cols} columns, again");
        let left: Vec<u32> = host(&gpu, &logits).iter().map(|x| x.to_bits()).collect();
        assert_eq!(left, rows.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), "logits are left as they are");
    }
}

#[test]
fn every_parameter_alone_and_with_every_other() {
    let Some(gpu) = gpu(ACTIVATIONS[1]) else { return };
    let cols = 5000;
    let mut random = Random::new(11);
    let rows = task_rows(&mut random, cols);
    let lists = lists(&mut random, cols);
    let mut tasks = Vec::new();
    for row in [0, 1, 4] {
        for bits in 0..64_u32 {
            let has = |bit: u32| bits >> bit & 1 == 1;
            let draw = Draw {
                inv_temperature: if has(0) { 1.0 / 0.6 } else { 1.0 },
                top_k: has(1).then_some(300),
                top_p: if has(2) { 0.8 } else { 1.0 },
                min_p: if has(3) { 0.1 } else { 0.0 },
                uniform: uniform(&mut random),
            };
            let edits = if has(4) { edits(&lists) } else { LogitEdits::default() };
            tasks.push(RowTask { row, choice: Choice::Draw(draw), edits, num_top: has(5).then_some(20) });
        }
    }
    let logits = tensor(&gpu, rows.len(), cols, &rows.concat());
    for (task, outcome) in tasks.iter().zip(sample(&gpu, &logits, &tasks)) {
        assert_eq!(outcome, reference(&rows[task.row], task), "{task:?}");
    }
}

#[test]
fn rows_of_largest_tokens() {
    let Some(gpu) = gpu(ACTIVATIONS[1]) else { return };
    for (num_rows, cols) in [(1, 1), (1, 4097), (17, 128_256), (256, 513)] {
        let mut random = Random::new(cols as u64);
        // Few different values, so that the lowest of equals matters.
        let mut data: Vec<f32> = (0..num_rows * cols).map(|_| random.below(50) as f32 - 25.0).collect();
        if num_rows > 4 {
            data[2 * cols + cols / 2] = f32::NAN;
            data[3 * cols..4 * cols].fill(f32::NEG_INFINITY);
            data[4 * cols + 5] = f32::INFINITY;
        }
        let plain = |row| RowTask { row, choice: Choice::Largest, edits: LogitEdits::default(), num_top: None };
        let tasks: Vec<RowTask<'_>> = (0..num_rows).map(plain).collect();
        let want: Vec<_> = data.chunks_exact(cols).zip(&tasks).map(|(row, task)| reference(row, task)).collect();
        let logits = tensor(&gpu, num_rows, cols, &data);
        assert_eq!(sample(&gpu, &logits, &tasks), want, "[{num_rows}, {cols}]");
        // By the way of other tasks too.
        let twice = [tasks.as_slice(), &tasks].concat();
        assert_eq!(sample(&gpu, &logits, &twice), [want.as_slice(), &want].concat(), "[{num_rows}, {cols}] twice");
    }
}

/// Chi-square of 40,000 draws of each kind against weights in f64.
#[test]
fn draws_follow_the_distribution() {
    let Some(gpu) = gpu(ACTIVATIONS[1]) else { return };
    let mut random = Random::new(5);
    let row: Vec<f32> = (0..300).map(|i| (i * 37 % 101) as f32 * 0.06).collect();
    let logits = tensor(&gpu, 1, row.len(), &row);
    let base = Draw { inv_temperature: 1.0 / 0.9, top_k: None, top_p: 1.0, min_p: 0.0, uniform: 0.0 };
    let num_draws = 40_000;
    for draw in [base, Draw { min_p: 0.2, ..base }] {
        let tasks: Vec<RowTask<'_>> = (0..num_draws)
            .map(|_| {
                let uniform = (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
                let choice = Choice::Draw(Draw { uniform, ..draw });
                RowTask { row: 0, choice, edits: LogitEdits::default(), num_top: None }
            })
            .collect();
        let mut seen = vec![0.0_f64; row.len()];
        for outcome in sample(&gpu, &logits, &tasks) {
            seen[outcome.unwrap().token as usize] += 1.0;
        }
        let weight = |x: f32| exp_neg((x - 6.0) * draw.inv_temperature);
        let weights: Vec<f64> =
            row.iter().map(|&x| f64::from(if weight(x) >= draw.min_p { weight(x) } else { 0.0 })).collect();
        let total: f64 = weights.iter().sum();
        let (mut chi2, mut cells) = (0.0, 0.0_f64);
        for (weight, seen) in weights.iter().zip(&seen) {
            let expected = weight / total * f64::from(num_draws);
            assert!(expected > 0.0 || *seen == 0.0, "a dropped token was drawn");
            if expected >= 10.0 {
                chi2 += (seen - expected).powi(2) / expected;
                cells += 1.0;
            }
        }
        assert!(cells > 50.0);
        // Mean `cells`, standard deviation sqrt(2 cells); four of them.
        assert!((chi2 - cells).abs() < 4.0 * (2.0 * cells).sqrt(), "{draw:?}: chi-square {chi2} over {cells} cells");
    }
}

#[test]
fn what_the_device_does_not_take() {
    let Some(gpu) = gpu(ACTIVATIONS[1]) else { return };
    let logits = tensor(&gpu, 2, 50, &[0.5; 100]);
    let task = RowTask { row: 1, choice: Choice::Largest, edits: LogitEdits::default(), num_top: Some(33) };
    let mut outcomes = Vec::new();
    assert!(!gpu.sample_rows(&logits, &[task], &mut outcomes).unwrap());
    assert!(gpu.sample_rows(&logits, &[RowTask { row: 2, ..task }], &mut outcomes).is_err());
    let wide = tensor(&gpu, 1, 400_000, &vec![0.5; 400_000]);
    assert!(!gpu.sample_rows(&wide, &[RowTask { row: 0, num_top: Some(1), ..task }], &mut outcomes).unwrap());
    assert!(gpu.sample_rows(&wide, &[RowTask { row: 0, num_top: None, ..task }], &mut outcomes).unwrap());
    assert!(gpu.sample_rows(&wide, &[], &mut outcomes).unwrap() && outcomes.is_empty());
}
