//! Where a step's rotary angles lie: one table for each kind of layer, made by the step's first layer of that kind
//! and read by the others. Knows which step a table belongs to; computes nothing.

use crate::device::Device;
use crate::memory::DeviceMemory;
use pagemill_backend::{BackendError, RopeTable};
use std::sync::Arc;

struct Table {
    inv_freq: Vec<f32>,
    magnitude: f32,
    memory: DeviceMemory,
    /// The batch whose angles it holds.
    serial: u64,
}

/// The tables of one device: as many as its model has kinds of layers.
#[derive(Default)]
pub(crate) struct AngleTables {
    tables: Vec<Table>,
    /// Outgrown ranges: recorded forwards may still name them.
    outgrown: Vec<DeviceMemory>,
}

impl AngleTables {
    /// The place of `num_tokens` rows of `[2, pairs]`, and whether it holds the angles of batch `serial` already;
    /// if not, the caller fills it. Allocates only while warming up.
    pub(crate) fn place(
        &mut self,
        device: &Arc<Device>,
        table: &RopeTable,
        num_tokens: u32,
        serial: u64,
    ) -> Result<(u64, bool), BackendError> {
        let bytes = num_tokens as usize * 2 * table.inv_freq.len() * 4;
        let serves = |held: &Table| held.magnitude == table.magnitude && held.inv_freq == table.inv_freq;
        if let Some(held) = self.tables.iter_mut().find(|held| serves(held)) {
            let current = held.serial == serial;
            held.serial = serial;
            if held.memory.len() >= bytes {
                return Ok((held.memory.address(), current));
            }
            let larger = Self::memory(device, bytes)?;
            self.outgrown.push(std::mem::replace(&mut held.memory, larger));
            return Ok((held.memory.address(), false));
        }
        let memory = Self::memory(device, bytes)?;
        let address = memory.address();
        self.tables.push(Table { inv_freq: table.inv_freq.clone(), magnitude: table.magnitude, memory, serial });
        Ok((address, false))
    }

    fn memory(device: &Arc<Device>, bytes: usize) -> Result<DeviceMemory, BackendError> {
        DeviceMemory::take(device, bytes.next_multiple_of(1 << 16), "rotary angles")
    }
}
