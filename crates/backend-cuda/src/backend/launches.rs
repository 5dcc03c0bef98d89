//! Which kernels ran: counts of launches, for tests and diagnosis.

use super::CudaBackend;

impl CudaBackend {
    /// How often the kernel for products of few tokens was launched, each launch of a recorded step counted once.
    /// For tests and diagnosis.
    pub fn small_product_launches(&self) -> u64 {
        self.linear.small_launches()
    }

    /// The same of the kernels for quantised weights that were repacked at load.
    pub fn packed_product_launches(&self) -> u64 {
        self.linear.packed().product_launches()
    }

    /// The same of the kernel for up to some hundred tokens.
    pub fn mid_product_launches(&self) -> u64 {
        self.linear.mid_launches()
    }

    /// The same of the kernel for more tokens.
    pub fn big_product_launches(&self) -> u64 {
        self.linear.big_launches()
    }

    /// The same of the kernel for gate and up of more tokens.
    pub fn wide_product_launches(&self) -> u64 {
        self.linear.wide_launches()
    }
}
