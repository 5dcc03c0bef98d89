//! The driver, one device's context and its streams; faults of the driver as this workspace's errors. Decides
//! whether there is a device at all. Knows no memory and no kernel.

use crate::kernels::Launch;
use cudarc::driver::{result, sys};
use pagemill_backend::BackendError;
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A GPU whose primary context this process holds.
pub(crate) struct Device {
    ordinal: i32,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    name: String,
    capability: (i32, i32),
    num_multiprocessors: usize,
    /// Whether ops only take what they would take: ranks rehearse without one another.
    rehearsing: AtomicBool,
    /// Filled where the device is a rank among others: why they have given up, once they have.
    called_off: OnceLock<Arc<OnceLock<String>>>,
    /// Filled where ranks share the GPU: ranges that are freed with the device.
    freed_late: OnceLock<Mutex<Vec<u64>>>,
}

// SAFETY: context and stream are handles that the driver lets any thread use; every entry binds the
// context to the calling thread first.
unsafe impl Send for Device {}
// SAFETY: as for Send.
unsafe impl Sync for Device {}

/// Devices that the driver shows; 0 where there is no driver.
///
/// # Errors
/// A driver that is there but does not start, in its own words.
pub(crate) fn count_devices() -> Result<usize, BackendError> {
    // SAFETY: looks for the library only; loading it runs its own initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Ok(0);
    }
    match result::init() {
        Ok(()) => {}
        // A driver without a device, and the stub that build machines have.
        Err(error)
            if matches!(error.0, sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_STUB_LIBRARY) =>
        {
            return Ok(0);
        }
        Err(error) => return Err(driver_fault("cuda", "starting the driver", error)),
    }
    let count = result::device::get_count().map_err(|error| driver_fault("cuda", "counting devices", error))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// What the driver said while it did `what`.
pub(crate) fn driver_fault(device: &str, what: &str, error: result::DriverError) -> BackendError {
    let said = error.error_string().map(|text| text.to_string_lossy().into_owned());
    let detail = format!("{what}: {}", said.unwrap_or_else(|_| format!("{error:?}")));
    BackendError::Device { device: device.to_owned(), detail }
}

impl Device {
    /// Opens device `ordinal` and makes a stream on it.
    pub(crate) fn open(ordinal: usize) -> Result<Self, BackendError> {
        let label = format!("cuda:{ordinal}");
        let count = count_devices()?;
        let refuse = |detail: String| Err(BackendError::Device { device: label.clone(), detail });
        if count == 0 {
            return refuse("no NVIDIA driver or no GPU on this machine".into());
        }
        if ordinal >= count {
            return refuse(format!("there is no such device; this machine has {count}"));
        }
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let fault = |what: &'static str| {
            let label = label.clone();
            move |error| driver_fault(&label, what, error)
        };
        let handle = result::device::get(ordinal).map_err(fault("opening the device"))?;
        let attribute = |attribute| {
            // SAFETY: `handle` was just given by the driver.
            unsafe { result::device::get_attribute(handle, attribute) }.map_err(fault("reading its attributes"))
        };
        use sys::CUdevice_attribute_enum as Attribute;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let name = result::device::get_name(handle).map_err(fault("reading its name"))?;
        // SAFETY: `handle` is a device; the context is released in `drop`.
        let context = unsafe { result::primary_ctx::retain(handle) }.map_err(fault("creating its context"))?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(fault("binding its context"))?;
        let stream =
            result::stream::create(result::stream::StreamKind::NonBlocking).map_err(fault("creating a stream"))?;
        let num_multiprocessors = usize::try_from(multiprocessors).unwrap_or(1);
        Ok(Self {
            ordinal,
            handle,
            context,
            stream,
            name,
            capability,
            num_multiprocessors,
            rehearsing: AtomicBool::new(false),
            called_off: OnceLock::new(),
            freed_late: OnceLock::new(),
        })
    }

    /// Keeps the device's context until the process ends, for what outlives every engine.
    pub(crate) fn keep_context(&self) -> Result<(), BackendError> {
        // SAFETY: `handle` is a device; this reference is never given back.
        unsafe { result::primary_ctx::retain(self.handle) }
            .map_err(|error| self.fault("keeping its context", error))?;
        self.bind()
    }

    /// `cuda:0`.
    pub(crate) fn label(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    /// As the driver counts it.
    pub(crate) fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The GPU's own number, the same for every process.
    pub(crate) fn uuid(&self) -> Result<[u8; 16], BackendError> {
        let uuid = result::device::get_uuid(self.handle).map_err(|error| self.fault("reading its UUID", error))?;
        Ok(uuid.bytes.map(c_char::cast_unsigned))
    }

    /// Whether kernels here can reach the memory of `peer` (of another GPU, or the same).
    pub(crate) fn reaches(&self, peer: &Device) -> Result<bool, BackendError> {
        if self.ordinal == peer.ordinal {
            return Ok(true);
        }
        let mut reaches = 0;
        // SAFETY: both handles were given by the driver.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, self.handle, peer.handle) }
            .result()
            .map_err(|error| self.fault("asking for peer access", error))?;
        Ok(reaches != 0)
    }

    /// See `Backend::rehearse`.
    pub(crate) fn set_rehearsing(&self, on: bool) {
        self.rehearsing.store(on, Ordering::Relaxed);
    }

    /// Whether the device is a rank among others.
    pub(crate) fn is_rank(&self) -> bool {
        self.called_off.get().is_some()
    }

    /// Whether nothing needs to be computed.
    pub(crate) fn is_rehearsing(&self) -> bool {
        self.rehearsing.load(Ordering::Relaxed)
    }

    /// Makes the device a rank among others: what it has computed is worth nothing once `reason` is there.
    pub(crate) fn join(&self, reason: &Arc<OnceLock<String>>) {
        let _ = self.called_off.set(Arc::clone(reason));
    }

    /// From now on memory is freed with the device only: the driver would wait for the whole GPU, and so for a rank
    /// there that waits for this one.
    pub(crate) fn free_late(&self) {
        self.freed_late.get_or_init(Mutex::default);
    }

    /// Whether the range at `address` is kept to be freed with the device.
    pub(crate) fn keeps(&self, address: u64) -> bool {
        let Some(kept) = self.freed_late.get() else { return false };
        kept.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        true
    }

    /// As the vendor names it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability, major and minor.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Multiprocessors.
    pub(crate) fn num_multiprocessors(&self) -> usize {
        self.num_multiprocessors
    }

    /// The stream on which every op runs.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Makes the context the calling thread's.
    pub(crate) fn bind(&self) -> Result<(), BackendError> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| self.fault("binding its context", error))
    }

    /// What the driver said while it did `what`.
    pub(crate) fn fault(&self, what: &str, error: result::DriverError) -> BackendError {
        driver_fault(&self.label(), what, error)
    }

    /// A fault in our own words.
    pub(crate) fn broken(&self, detail: impl Into<String>) -> BackendError {
        BackendError::Device { device: self.label(), detail: detail.into() }
    }

    /// Waits until everything on the stream is done; a kernel's fault is told here.
    pub(crate) fn synchronize(&self) -> Result<(), BackendError> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| self.fault("a step on the device", error))?;
        match self.called_off.get().and_then(|reason| reason.get()) {
            Some(reason) => Err(BackendError::Collective { op: "step", detail: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Whether everything on the stream is done; a kernel's fault is told here.
    pub(crate) fn is_idle(&self) -> Result<bool, BackendError> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamQuery(self.stream) }.result() {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(self.fault("a step on the device", error)),
        }
    }

    /// Free and total bytes of device memory.
    pub(crate) fn memory_info(&self) -> Result<(usize, usize), BackendError> {
        self.bind()?;
        result::mem_get_info().map_err(|error| self.fault("reading its memory", error))
    }

    /// How many clusters of `thread_blocks` thread blocks of the kernel are on the chip at once.
    pub(crate) fn max_clusters(
        &self,
        function: sys::CUfunction,
        thread_blocks: u32,
        launch: &Launch,
    ) -> Result<u32, BackendError> {
        self.bind()?;
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: thread_blocks, y: 1, z: 1 },
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid.0,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        let mut count = 0;
        // SAFETY: writes one number; the configuration and its attribute live during the call.
        unsafe { sys::cuOccupancyMaxActiveClusters(&raw mut count, function, &raw const config) }
            .result()
            .map_err(|error| self.fault("counting the clusters of a kernel", error))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Launches `function` with one struct as its argument.
    ///
    /// # Safety
    /// `A` repeats the struct of the kernel behind `function`, field by field; every pointer in it is valid for
    /// what the kernel reads and writes, up to the kernel's end on this device's stream; the block size is one
    /// that the kernel was written for.
    pub(crate) unsafe fn launch<A: Copy>(
        &self,
        function: sys::CUfunction,
        grid: (u32, u32),
        threads: u32,
        shared_bytes: u32,
        args: &A,
    ) -> Result<(), BackendError> {
        if grid.0 == 0 || grid.1 == 0 {
            return Ok(());
        }
        self.bind()?;
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies the one argument during the call; the rest is this function's contract.
        unsafe {
            result::launch_kernel(
                function,
                (grid.0, grid.1, 1),
                (threads, 1, 1),
                shared_bytes,
                self.stream,
                &mut params,
            )
        }
        .map_err(|error| self.fault("launching a kernel", error))
    }

    /// As [`Self::launch`], of a kernel whose thread blocks work in clusters of `cluster` neighbours in x (compute
    /// capability 9).
    ///
    /// # Safety
    /// As for [`Self::launch`]. `cluster` divides the grid and is the size that the kernel was written for.
    pub(crate) unsafe fn launch_cluster<A: Copy>(
        &self,
        function: sys::CUfunction,
        grid: (u32, u32),
        cluster: u32,
        threads: u32,
        shared_bytes: u32,
        args: &A,
    ) -> Result<(), BackendError> {
        let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
        value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        // SAFETY: this function's contract.
        unsafe { self.launch_with(function, grid, threads, shared_bytes, args, (id, value)) }
    }

    /// As [`Self::launch`], of a kernel that may begin while the one before it on the stream still runs
    /// (programmatic dependent launch, compute capability 9; elsewhere a plain launch). Also while recording: the
    /// graph keeps the edge as it is.
    ///
    /// # Safety
    /// As for [`Self::launch`]. Before its `griddepcontrol.wait` the kernel writes nothing, and reads nothing that
    /// another kernel of the step writes: the kernel in front, and what lies before it, may still run.
    pub(crate) unsafe fn launch_overlapped<A: Copy>(
        &self,
        function: sys::CUfunction,
        grid: (u32, u32),
        threads: u32,
        shared_bytes: u32,
        args: &A,
    ) -> Result<(), BackendError> {
        // Every image that is loaded on capability 9 was compiled for it: the wait is in the kernel.
        if self.capability.0 < 9 || grid.0 == 0 || grid.1 == 0 {
            // SAFETY: this function's contract.
            return unsafe { self.launch(function, grid, threads, shared_bytes, args) };
        }
        let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
        // SAFETY: this function's contract.
        unsafe { self.launch_with(function, grid, threads, shared_bytes, args, (id, value)) }
    }

    /// As [`Self::launch`], with one attribute.
    ///
    /// # Safety
    /// As for [`Self::launch`]; the kernel was written for the attribute.
    unsafe fn launch_with<A: Copy>(
        &self,
        function: sys::CUfunction,
        grid: (u32, u32),
        threads: u32,
        shared_bytes: u32,
        args: &A,
        (id, value): (sys::CUlaunchAttributeID, sys::CUlaunchAttributeValue),
    ) -> Result<(), BackendError> {
        self.bind()?;
        let mut attribute = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: self.stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies configuration, attribute and argument during the call; the rest is this
        // function's contract.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, params.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(|error| self.fault("launching a kernel", error))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Nothing can be done about a driver that refuses to let go.
        let _ = self.synchronize();
        if let Some(kept) = self.freed_late.get_mut() {
            for address in kept.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
                // SAFETY: given up by its owner, freed once, and nothing runs any more.
                let _ = unsafe { result::free_sync(address) };
            }
        }
        // SAFETY: made in `open` and used by nobody any more: buffers hold the device by `Arc`.
        let _ = unsafe { result::stream::destroy(self.stream) };
        // SAFETY: retained in `open`.
        let _ = unsafe { result::primary_ctx::release(self.handle) };
    }
}
