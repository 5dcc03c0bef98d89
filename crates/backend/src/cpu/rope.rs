//! Rotary angles of a step: computed once for each (frequency table, positions) and kept while the
//! step's layers use them. Knows positions and frequencies; how pairs are rotated is the kernels'.
//!
//! An angle is `position as f32 * inv_freq` rounded to f32, as Hugging Face computes it; its cosine
//! and sine are taken in f64 and rounded once, so that they are right to the last bit at any position.

use super::kernels::RowKernels;
use super::memory::AlignedBytes;
use super::pool::ThreadPool;
use crate::{BackendError, RopeStyle, RopeTable};

/// Frequency tables kept at once: one for each kind of layer that a model alternates.
const KEPT_TABLES: usize = 4;

/// Turns one head by the token's `angles` (cosines, then sines); elements beyond them stay.
pub(crate) fn rotate(kernels: &RowKernels, style: RopeStyle, angles: &[f32], head: &mut [f32]) {
    let (cos, sin) = angles.split_at(angles.len() / 2);
    match style {
        RopeStyle::Half => {
            let (low, high) = head[..angles.len()].split_at_mut(cos.len());
            (kernels.rotate_halves)(low, high, cos, sin);
        }
        RopeStyle::Interleaved => (kernels.rotate_pairs)(&mut head[..angles.len()], cos, sin),
    }
}

/// Cosines and sines of one step.
#[derive(Default)]
struct StepAngles {
    inv_freq: Vec<f32>,
    magnitude: f32,
    positions: Vec<u32>,
    /// `[T, 2, pairs]`: cosines, then sines.
    values: Option<AlignedBytes>,
    last_used: u64,
}

/// The tables of the current step.
#[derive(Default)]
pub(crate) struct AngleTables {
    tables: Vec<StepAngles>,
    uses: u64,
}

impl StepAngles {
    fn serves(&self, table: &RopeTable) -> bool {
        self.magnitude == table.magnitude && self.inv_freq == table.inv_freq
    }
}

impl AngleTables {
    /// `[T, 2, pairs]` for these positions: as the step's last layer left it, else made anew in the
    /// memory of the same frequencies, which grows only while warming up.
    pub(crate) fn get(
        &mut self,
        pool: &ThreadPool,
        table: &RopeTable,
        positions: &[u32],
    ) -> Result<&[f32], BackendError> {
        self.uses += 1;
        let idx = self.slot(table);
        if self.tables[idx].positions != positions || !self.tables[idx].serves(table) {
            fill(pool, &mut self.tables[idx], table, positions)?;
        }
        let held = &mut self.tables[idx];
        held.last_used = self.uses;
        let len = positions.len() * 2 * table.inv_freq.len();
        Ok(held.values.as_ref().map_or(&[][..], |values| &values.as_f32()[..len]))
    }

    /// The slot of these frequencies; a new one, or the least recently used, when there is none.
    fn slot(&mut self, table: &RopeTable) -> usize {
        if let Some(idx) = self.tables.iter().position(|held| held.serves(table)) {
            return idx;
        }
        if self.tables.len() < KEPT_TABLES {
            self.tables.push(StepAngles::default());
            return self.tables.len() - 1;
        }
        (0..self.tables.len()).min_by_key(|&idx| self.tables[idx].last_used).unwrap_or(0)
    }

    /// Bytes held.
    pub(crate) fn len_bytes(&self) -> usize {
        self.tables.iter().filter_map(|held| held.values.as_ref()).map(AlignedBytes::len).sum()
    }
}

fn fill(pool: &ThreadPool, held: &mut StepAngles, table: &RopeTable, positions: &[u32]) -> Result<(), BackendError> {
    let pairs = table.inv_freq.len();
    let len = positions.len() * 2 * pairs;
    if held.values.as_ref().is_none_or(|values| values.len() < len * 4) {
        held.values = Some(AlignedBytes::zeroed((len * 4).next_multiple_of(4096), "rotary angles")?);
    }
    // Not the same until filled: an error below must not leave a false match behind.
    held.positions.clear();
    let Some(values) = held.values.as_mut() else {
        return Ok(());
    };
    pool.run_rows(&mut values.as_f32_mut()[..len], 2 * pairs, 16, &|first_token, rows| {
        for (row, &position) in rows.chunks_exact_mut(2 * pairs).zip(&positions[first_token..]) {
            let (cos, sin) = row.split_at_mut(pairs);
            fill_row(position, table, cos, sin);
        }
    })?;
    held.inv_freq.clone_from(&table.inv_freq);
    held.magnitude = table.magnitude;
    held.positions.extend_from_slice(positions);
    Ok(())
}

#[allow(clippy::cast_possible_truncation)] // rounding to f32 is meant
fn fill_row(position: u32, table: &RopeTable, cos: &mut [f32], sin: &mut [f32]) {
    for ((cos, sin), &inv_freq) in cos.iter_mut().zip(sin).zip(&table.inv_freq) {
        let angle = f64::from(position as f32 * inv_freq);
        *cos = angle.cos() as f32 * table.magnitude;
        *sin = angle.sin() as f32 * table.magnitude;
    }
}
