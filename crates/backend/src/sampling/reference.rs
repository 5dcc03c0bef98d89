//! Sampling by sorting a whole row: slow, and short enough to be read against the definitions.

use super::{Choice, Draw, LogitEdits, RowOutcome, RowReport, RowTask, UNIT, exp_neg, units_of};

/// A token's logit after edits, and its id.
type Token = (f32, u32);

/// What any device gives for a task whose row is `row` `[V]`; `None` where the row holds NaN or +∞, or nothing but −∞.
#[must_use]
pub fn reference(row: &[f32], task: &RowTask<'_>) -> Option<RowOutcome> {
    let largest = largest_of(row);
    if row.iter().any(|x| x.is_nan()) || !largest.is_finite() {
        return None;
    }
    let mut edited = row.to_vec();
    edit(&mut edited, &task.edits);
    let token = match task.choice {
        Choice::Given(token) => token,
        Choice::Largest => sorted(&edited).first()?.1,
        Choice::Draw(draw) => draw_token(&edited, &draw),
    };
    let report = task.num_top.map(|num_top| {
        let logit = row.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let order = sorted(row);
        let better = order.iter().filter(|&&(x, id)| x > logit || (x == logit && id < token)).count();
        let sum: u64 = row.iter().map(|&x| units_of(exp_neg(x - largest))).sum();
        RowReport {
            log_sum: f64::from(largest) + (sum as f64 * UNIT).ln(),
            logit,
            rank: u32::try_from(better + 1).unwrap_or(u32::MAX),
            top: order.iter().take(num_top as usize).map(|&(logit, id)| (id, logit)).collect(),
        }
    });
    Some(RowOutcome { token, report })
}

fn largest_of(row: &[f32]) -> f32 {
    row.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// All tokens in order.
fn sorted(row: &[f32]) -> Vec<Token> {
    let mut order: Vec<Token> = (0..).zip(row).map(|(id, &logit)| (logit, id)).collect();
    // `+ 0.0` makes both zeros the same.
    order.sort_by(|a, b| (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1)));
    order
}

fn edit(row: &mut [f32], edits: &LogitEdits<'_>) {
    let mut change = |id: u32, change: &dyn Fn(f32) -> f32| {
        if let Some(logit) = row.get_mut(id as usize) {
            // Not `clamp`, which would let a NaN through.
            #[allow(clippy::manual_clamp)]
            let finite = change(*logit).max(f32::MIN).min(f32::MAX);
            *logit = finite;
        }
    };
    for &(id, bias) in edits.bias {
        change(id, &|x| x + bias);
    }
    let penalty = edits.repetition_penalty;
    let penalise = |x: f32| if x < 0.0 { x * penalty } else { x / penalty };
    for &id in edits.prompt_ids {
        change(id, &penalise);
    }
    for &(id, count) in edits.output_counts {
        if penalty != 1.0 && !edits.prompt_ids.contains(&id) {
            change(id, &penalise);
        }
        if edits.presence_penalty != 0.0 || edits.frequency_penalty != 0.0 {
            change(id, &|x| x - (edits.presence_penalty + edits.frequency_penalty * count as f32));
        }
    }
    for &id in edits.masked {
        change(id, &|_| f32::MIN);
    }
}

fn draw_token(row: &[f32], draw: &Draw) -> u32 {
    let largest = largest_of(row);
    let weight = |logit: f32| exp_neg((logit - largest) * draw.inv_temperature);
    let mut kept = sorted(row);
    if let Some(k) = draw.top_k.filter(|&k| k > 0) {
        kept.truncate(k as usize);
    }
    let sum = |tokens: &[Token]| tokens.iter().map(|&(logit, _)| units_of(weight(logit))).sum::<u64>();
    if draw.top_p < 1.0 {
        let total = sum(&kept);
        let target = to_units((f64::from(draw.top_p) * total as f64).ceil()).clamp(1, total);
        let mut mass = 0;
        let enough = kept.iter().position(|&(logit, _)| {
            mass += units_of(weight(logit));
            mass >= target
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
    }
    kept.retain(|&(logit, _)| weight(logit) >= draw.min_p);
    kept.sort_by_key(|&(_, id)| id);
    let total = sum(&kept);
    let target = to_units(draw.uniform * total as f64).min(total.saturating_sub(1));
    let mut mass = 0;
    let drawn = kept.iter().find(|&&(logit, _)| {
        mass += units_of(weight(logit));
        mass > target
    });
    drawn.map_or(0, |&(_, id)| id)
}

/// A share of units, rounded down.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // sums of units, below 2^63
fn to_units(share: f64) -> u64 {
    share as u64
}
