//! Whether the tests run under an emulator, which is some fifty times slower: they then take smaller shapes that
//! still reach every kernel. `cargo xtask test` sets the variable.

/// Whether shapes are to be small.
pub fn is_emulated() -> bool {
    std::env::var_os("PAGEMILL_TEST_EMULATED").is_some()
}
