//! cuBLASLt with kept plans: the descriptors and the algorithm of a shape are made once. Decides which algorithm
//! runs: the library's own first choice, or, where results must not depend on the number of tokens, its first choice
//! for one fixed number of them among those that do not split C. Knows no weights and no tensors.

use crate::device::Device;
use crate::memory::DeviceMemory;
use cudarc::cublaslt::{result, sys};
use pagemill_backend::{BackendError, DType};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// What algorithms may use, as the library recommends for large chips.
const WORKSPACE_BYTES: usize = 64 << 20;
/// `CUBLAS_OP_T`: the library's own enumeration is not among its bindings.
const OP_TRANSPOSED: i32 = 1;
/// Tokens for which the algorithm is chosen that serves any number of them: enough for tensor cores, few enough that
/// a decode step keeps the chip busy.
const DETERMINISTIC_TOKENS: usize = 64;
/// `CUBLASLT_REDUCTION_SCHEME_NONE`: C is not split.
const NO_REDUCTION: u32 = 0;
/// Plans kept at most; then all are made anew.
const MAX_PLANS: usize = 1 << 14;

/// `out [T, N] = x [T, C] · weightᵀ [C, N]`, row-major, f32 sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// `T`.
    pub(crate) num_tokens: usize,
    /// `N`.
    pub(crate) rows: usize,
    /// `C`.
    pub(crate) cols: usize,
    /// Elements between two rows of `out`; at least `N`.
    pub(crate) out_stride: usize,
    /// Element type of `x` and the weight.
    pub(crate) input: DType,
    /// Element type of `out`: the input's, or F32.
    pub(crate) output: DType,
}

struct Plan {
    matmul: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The library's handle on one device. Made once in a process and never destroyed: destroying one waits for the whole
/// device, and such a wait spoils whatever another engine of the process is recording on it.
#[derive(Clone, Copy)]
struct Handle(sys::cublasLtHandle_t);

// SAFETY: the library lets any thread use its handle, several at a time.
unsafe impl Send for Handle {}

/// By the device's ordinal.
static HANDLES: Mutex<Vec<(i32, Handle)>> = Mutex::new(Vec::new());

impl Handle {
    fn of(device: &Device) -> Result<Self, BackendError> {
        let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, handle)) = handles.iter().find(|(ordinal, _)| *ordinal == device.ordinal()) {
            return Ok(*handle);
        }
        device.keep_context()?;
        let handle = result::create_handle().map_err(|error| device.broken(format!("starting cuBLASLt: {error}")))?;
        handles.push((device.ordinal(), Handle(handle)));
        Ok(Handle(handle))
    }
}

/// The library's handle, its workspace and the plans.
pub(crate) struct Matmul {
    device: Arc<Device>,
    handle: Handle,
    workspace: DeviceMemory,
    /// Whether a row of `out` has the same bits for any number of tokens.
    deterministic: bool,
    /// `None`: the library has no algorithm for the shape.
    plans: HashMap<Shape, Option<Plan>>,
}

// SAFETY: handles and descriptors may move between threads; calls are serialised by `&mut self`.
unsafe impl Send for Matmul {}

impl Matmul {
    /// Loads the library.
    ///
    /// # Errors
    /// It is not there, or does not start.
    pub(crate) fn new(device: &Arc<Device>, deterministic: bool) -> Result<Self, BackendError> {
        // SAFETY: looks for the library only.
        if !unsafe { sys::is_culib_present() } {
            return Err(device.broken(
                "libcublasLt is not on the loader's path; it comes with the CUDA toolkit (LD_LIBRARY_PATH can name its folder)",
            ));
        }
        device.bind()?;
        let handle = Handle::of(device)?;
        let workspace = DeviceMemory::take(device, WORKSPACE_BYTES, "cuBLASLt")?;
        Ok(Self { device: Arc::clone(device), handle, workspace, deterministic, plans: HashMap::new() })
    }

    /// Bytes held.
    pub(crate) fn len_bytes(&self) -> usize {
        self.workspace.len()
    }

    /// Multiplies; false, and nothing done, when the library has no algorithm for the shape.
    ///
    /// # Safety
    /// `weight`, `x` and `out` are device memory of the shape's sizes, in use on the device's stream only.
    pub(crate) unsafe fn run(&mut self, shape: Shape, weight: u64, x: u64, out: u64) -> Result<bool, BackendError> {
        self.device.bind()?;
        if !self.plans.contains_key(&shape) {
            if self.plans.len() >= MAX_PLANS {
                self.forget();
            }
            let plan = self.plan(shape)?;
            self.plans.insert(shape, plan);
        }
        let Some(Some(plan)) = self.plans.get(&shape) else {
            return Ok(false);
        };
        let (one, zero) = (1.0_f32, 0.0_f32);
        let at = |address: u64| address as *const c_void;
        // SAFETY: the plan's parts live until `forget`; memory is the caller's promise. `out` is both C (times
        // zero) and D.
        unsafe {
            result::matmul(
                self.handle.0,
                plan.matmul,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&zero).cast(),
                at(weight),
                plan.weight,
                at(x),
                plan.x,
                at(out),
                plan.out,
                at(out).cast_mut(),
                plan.out,
                &raw const plan.algorithm,
                at(self.workspace.address()).cast_mut(),
                self.workspace.len(),
                self.device.stream().cast(),
            )
        }
        .map_err(|error| self.device.broken(format!("multiplying {shape:?}: {error}")))?;
        Ok(true)
    }

    /// The library counts columns first: it sees `outᵀ [N, T] = weight [N, C] · xᵀ [C, T]`, the weight stored
    /// transposed.
    fn plan(&self, shape: Shape) -> Result<Option<Plan>, BackendError> {
        let fault = |error: result::CublasError| self.device.broken(format!("planning {shape:?}: {error}"));
        let (input, output) = (library_type(shape.input), library_type(shape.output));
        let layout = |dtype, rows: usize, cols: usize, stride: usize| {
            let stride = i64::try_from(stride).unwrap_or(i64::MAX);
            result::create_matrix_layout(dtype, rows as u64, cols as u64, stride).map_err(fault)
        };
        let matmul =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F)
                .map_err(fault)?;
        // SAFETY: the attribute's value is read during the call.
        unsafe {
            result::set_matmul_desc_attribute(
                matmul,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                std::ptr::from_ref(&OP_TRANSPOSED).cast(),
                size_of_val(&OP_TRANSPOSED),
            )
        }
        .map_err(fault)?;
        let weight = layout(input, shape.cols, shape.rows, shape.cols)?;
        let tokens = |count: usize| {
            Ok((layout(input, shape.cols, count, shape.cols)?, layout(output, shape.rows, count, shape.out_stride)?))
        };
        let (x, out) = tokens(shape.num_tokens)?;
        let found = if self.deterministic {
            let (x, out) = tokens(DETERMINISTIC_TOKENS)?;
            let found = self.choose(matmul, weight, x, out);
            // SAFETY: both were just made, and nothing keeps them.
            unsafe { result::destroy_matrix_layout(x).and_then(|()| result::destroy_matrix_layout(out)) }
                .map_err(fault)?;
            found
        } else {
            self.choose(matmul, weight, x, out)
        };
        let none = sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED;
        match found {
            Ok(algorithm) => Ok(Some(Plan { matmul, weight, x, out, algorithm })),
            Err(result::CublasError(status)) if status == none => Ok(None),
            Err(error) => Err(fault(error)),
        }
    }

    /// The library's first choice for such matrices.
    fn choose(
        &self,
        matmul: sys::cublasLtMatmulDesc_t,
        weight: sys::cublasLtMatrixLayout_t,
        x: sys::cublasLtMatrixLayout_t,
        out: sys::cublasLtMatrixLayout_t,
    ) -> Result<sys::cublasLtMatmulAlgo_t, result::CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = result::create_matmul_pref()?;
        let workspace_bytes = self.workspace.len() as u64;
        let (bytes, scheme) = (std::ptr::from_ref(&workspace_bytes).cast(), std::ptr::from_ref(&NO_REDUCTION).cast());
        // SAFETY: the attributes' values are read during the calls; the descriptors are the caller's.
        let found = unsafe {
            let limit = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let mut set = result::set_matmul_pref_attribute(preference, limit, bytes, size_of_val(&workspace_bytes));
            if self.deterministic {
                let mask = Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
                set = set.and_then(|()| {
                    result::set_matmul_pref_attribute(preference, mask, scheme, size_of_val(&NO_REDUCTION))
                });
            }
            set.and_then(|()| result::get_matmul_algo_heuristic(self.handle.0, matmul, weight, x, out, out, preference))
        };
        // SAFETY: made above, destroyed once.
        unsafe { result::destroy_matmul_pref(preference) }?;
        found.map(|found| found.algo)
    }

    fn forget(&mut self) {
        for plan in self.plans.drain().filter_map(|(_, plan)| plan) {
            // SAFETY: made in `plan`, destroyed once; the library copies what a running product needs.
            unsafe {
                let _ = result::destroy_matrix_layout(plan.weight);
                let _ = result::destroy_matrix_layout(plan.x);
                let _ = result::destroy_matrix_layout(plan.out);
                let _ = result::destroy_matmul_desc(plan.matmul);
            }
        }
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        self.forget();
    }
}

fn library_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}
