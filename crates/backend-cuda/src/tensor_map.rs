//! Matrices of 16-bit elements as the bulk copy engine is told of them. Knows no op.

use crate::device::Device;
use crate::kernels::Half;
use cudarc::driver::sys;
use pagemill_backend::BackendError;

/// Rows in device memory, read in boxes: 128-byte swizzle, 256-byte L2 promotion, zeros outside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapShape {
    /// Elements of a row, rows.
    pub(crate) dims: [u64; 2],
    /// Bytes from row to row; a multiple of 16.
    pub(crate) stride_bytes: u64,
    /// Elements (64 at most) and rows (256 at most) of a box.
    pub(crate) box_dims: [u32; 2],
}

/// The `CUtensorMap` of the matrix at `address`, a multiple of 16; `what` it is, for the error.
///
/// # Errors
/// The driver refuses the shape.
pub(crate) fn tensor_map(
    device: &Device,
    address: u64,
    element: Half,
    shape: &MapShape,
    what: &str,
) -> Result<[u64; 16], BackendError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let data_type = match element {
        Half::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Half::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    let element_steps = [1_u32; 2];
    device.bind()?;
    // SAFETY: writes one map and reads two sizes, one stride (of the second dimension), two of the box and two
    // steps; the address is only noted down.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            data_type,
            2,
            address as *mut std::ffi::c_void,
            shape.dims.as_ptr(),
            &raw const shape.stride_bytes,
            shape.box_dims.as_ptr(),
            element_steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|error| device.fault(&format!("describing {what} to the copy engine"), error))?;
    Ok(map.opaque)
}
