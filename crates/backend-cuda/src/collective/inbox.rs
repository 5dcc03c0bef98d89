//! Device memory that the GPUs of a stage write into: mapped for them alone, so that all other allocations stay what
//! they are (peer access to a whole context would map every later one for all peers, and make it wait for them).

use crate::device::Device;
use cudarc::driver::{result, sys};
use pagemill_backend::BackendError;
use std::sync::Arc;

/// A zeroed range of a device, read and written by others too.
pub(crate) struct Inbox {
    device: Arc<Device>,
    address: u64,
    len: usize,
    handle: sys::CUmemGenericAllocationHandle,
}

fn location(device: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal() }
}

impl Inbox {
    /// `len` bytes on `device` for all of `writers`, which can reach it.
    pub(crate) fn take(device: &Arc<Device>, len: usize, writers: &[Arc<Device>]) -> Result<Self, BackendError> {
        let fault = |error| device.fault("memory for other GPUs to write into", error);
        device.bind()?;
        let prop = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: location(device),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let granularity = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        let mut unit = 0;
        // SAFETY: plain questions and allocations; what was made is undone in `drop`, from its handle on.
        let mut inbox = unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut unit, &raw const prop, granularity).result().map_err(fault)?;
            let len = len.next_multiple_of(unit.max(1));
            let mut handle = 0;
            sys::cuMemCreate(&raw mut handle, len, &raw const prop, 0).result().map_err(fault)?;
            Self { device: Arc::clone(device), address: 0, len, handle }
        };
        let is_first = |at: usize| writers[..at].iter().all(|other| other.ordinal() != writers[at].ordinal());
        let access: Vec<sys::CUmemAccessDesc> = (0..writers.len())
            .filter(|&at| is_first(at))
            .map(|at| sys::CUmemAccessDesc {
                location: location(&writers[at]),
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        // SAFETY: the whole of what was just created, at a range of its own; zeroed before anybody knows of it.
        unsafe {
            sys::cuMemAddressReserve(&raw mut inbox.address, inbox.len, 0, 0, 0).result().map_err(fault)?;
            sys::cuMemMap(inbox.address, inbox.len, 0, inbox.handle, 0).result().map_err(fault)?;
            sys::cuMemSetAccess(inbox.address, inbox.len, access.as_ptr(), access.len()).result().map_err(fault)?;
            result::memset_d8_async(inbox.address, 0, inbox.len, device.stream()).map_err(fault)?;
        }
        device.synchronize()?;
        Ok(inbox)
    }

    /// Where it lies, for all of its writers.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        if self.device.bind().is_err() {
            return;
        }
        // SAFETY: as `take` made them, each once; the caller's ranks have ended. Unmapping what was never mapped is
        // refused and changes nothing.
        unsafe {
            if self.address != 0 {
                let _ = sys::cuMemUnmap(self.address, self.len);
                let _ = sys::cuMemAddressFree(self.address, self.len);
            }
            let _ = sys::cuMemRelease(self.handle);
        }
    }
}
