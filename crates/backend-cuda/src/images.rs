//! The compiled kernels: which image fits a chip, and every kernel of it by name. Decides nothing about when a
//! kernel runs.

use crate::device::Device;
use cudarc::driver::{result, sys};
use pagemill_backend::BackendError;
use std::collections::HashMap;
use std::sync::Arc;

/// Dynamic shared memory that every kernel may have.
const SHARED_BYTES_UNASKED: u32 = 48 << 10;

/// One `.cu` file compiled for one target.
pub(crate) struct Image {
    file: &'static str,
    target: &'static str,
    bytes: &'static [u8],
}

/// The driver reads images as words; PTX as text with an end.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The target whose kernels use what Hopper alone has.
const HOPPER_TARGET: &str = "sm_90a";

/// The targets that a chip of this capability runs, best first.
fn targets_for(capability: (i32, i32)) -> &'static [&'static str] {
    match capability {
        (9, 0) => &[HOPPER_TARGET, "compute_90", "sm_80"],
        (8, _) => &["sm_80"],
        (major, _) if major > 9 => &["compute_90"],
        _ => &[],
    }
}

/// All kernels of one device.
pub(crate) struct Kernels {
    device: Arc<Device>,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<String, sys::CUfunction>,
    target: &'static str,
}

// SAFETY: modules and functions are handles that any thread may use; see `Device`.
unsafe impl Send for Kernels {}
// SAFETY: as for Send.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the images that fit the device best.
    ///
    /// # Errors
    /// None fits, or the driver refuses one.
    pub(crate) fn load(device: &Arc<Device>) -> Result<Self, BackendError> {
        let capability = device.capability();
        let built = |target: &&&str| IMAGES.iter().any(|image| image.target == **target);
        let target = targets_for(capability).iter().find(built).copied().ok_or_else(|| {
            let (major, minor) = capability;
            let mut built: Vec<&str> = IMAGES.iter().map(|image| image.target).collect();
            built.sort_unstable();
            built.dedup();
            device.broken(format!(
                "{} has compute capability {major}.{minor}; this build has kernels for {}",
                device.name(),
                built.join(", ")
            ))
        })?;
        let mut kernels = Self { device: Arc::clone(device), modules: Vec::new(), functions: HashMap::new(), target };
        for image in IMAGES.iter().filter(|image| image.target == target) {
            kernels.load_image(image)?;
        }
        Ok(kernels)
    }

    fn load_image(&mut self, image: &Image) -> Result<(), BackendError> {
        // A cubin knows its length, and text ends at a zero: one more costs nothing.
        let mut bytes = image.bytes.to_vec();
        bytes.push(0);
        let what = format!("loading kernels of {} for {}", image.file, image.target);
        let fault = |error| self.device.fault(&what, error);
        self.device.bind()?;
        // SAFETY: a whole image, as nvcc wrote it; the driver copies it.
        let module = unsafe { result::module::load_data(bytes.as_ptr().cast()) }.map_err(fault)?;
        self.modules.push(module);
        let mut count = 0;
        // SAFETY: the module was just loaded.
        unsafe { sys::cuModuleGetFunctionCount(&raw mut count, module) }.result().map_err(fault)?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: as many as the module has.
        unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) }.result().map_err(fault)?;
        for function in functions {
            let mut name = std::ptr::null();
            // SAFETY: the function was just enumerated; its name lives as long as the module.
            let name = unsafe {
                sys::cuFuncGetName(&raw mut name, function).result().map_err(fault)?;
                std::ffi::CStr::from_ptr(name)
            };
            self.functions.insert(name.to_string_lossy().into_owned(), function);
        }
        Ok(())
    }

    /// The kernel of that name.
    pub(crate) fn get(&self, name: &str) -> Result<sys::CUfunction, BackendError> {
        self.functions
            .get(name)
            .copied()
            .ok_or_else(|| self.device.broken(format!("this build has no kernel {name} for {}", self.target)))
    }

    /// The kernel of that name, allowed as much dynamic shared memory as its launches ask for.
    pub(crate) fn get_with_shared(&self, name: &str, shared_bytes: u32) -> Result<sys::CUfunction, BackendError> {
        let function = self.get(name)?;
        if shared_bytes > SHARED_BYTES_UNASKED {
            let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            self.set(function, limit, shared_bytes, || format!("giving {name} {shared_bytes} bytes of shared memory"))?;
        }
        Ok(function)
    }

    fn set(
        &self,
        function: sys::CUfunction,
        attribute: sys::CUfunction_attribute,
        value: u32,
        what: impl FnOnce() -> String,
    ) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: a function of a loaded module.
        unsafe { result::function::set_function_attribute(function, attribute, value.cast_signed()) }
            .map_err(|error| self.device.fault(&what(), error))
    }

    /// As [`Self::get_with_shared`], of a kernel that wants `percent` of a multiprocessor's memory as shared memory and
    /// the rest as L1 cache.
    pub(crate) fn get_with_carveout(
        &self,
        name: &str,
        shared_bytes: u32,
        percent: Option<u32>,
    ) -> Result<sys::CUfunction, BackendError> {
        let function = self.get_with_shared(name, shared_bytes)?;
        if let Some(percent) = percent {
            let carveout = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            self.set(function, carveout, percent, || format!("asking for {percent} % of shared memory for {name}"))?;
        }
        Ok(function)
    }

    /// Whether they are the image with bodies for Hopper: wgmma, the copy engine, clusters.
    pub(crate) fn are_for_hopper(&self) -> bool {
        self.target == HOPPER_TARGET
    }

    /// What the kernels were compiled for.
    pub(crate) fn target(&self) -> &'static str {
        self.target
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let bound = self.device.synchronize().is_ok();
        for &module in &self.modules {
            if bound {
                // SAFETY: loaded in `load_image`, unloaded once, nothing of it runs.
                let _ = unsafe { result::module::unload(module) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_built_for_every_target() {
        let mut files: Vec<&str> = IMAGES.iter().map(|image| image.file).collect();
        files.sort_unstable();
        files.dedup();
        assert!(files.contains(&"rows") && files.contains(&"attention_plain"), "{files:?}");
        let mut targets: Vec<&str> = IMAGES.iter().map(|image| image.target).collect();
        targets.sort_unstable();
        targets.dedup();
        assert_eq!(IMAGES.len(), files.len() * targets.len());
        for image in IMAGES {
            let is_text = image.bytes.starts_with(b"//");
            assert_eq!(is_text, image.target.starts_with("compute_"), "{} {}", image.file, image.target);
            assert!(is_text || image.bytes.starts_with(b"\x7fELF"), "{} {}", image.file, image.target);
        }
    }

    #[test]
    fn chips_get_the_nearest_target() {
        assert_eq!(targets_for((9, 0))[0], "sm_90a");
        assert_eq!(targets_for((8, 6)), ["sm_80"]);
        assert_eq!(targets_for((10, 0)), ["compute_90"]);
        assert!(targets_for((7, 5)).is_empty());
    }
}
