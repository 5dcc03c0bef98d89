//! Every op of the CUDA device against the CPU's, and the zoo through the whole engine. Where there is no GPU each
//! test says so and ends.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
#![allow(clippy::explicit_write)] // the harness would hold back what eprintln! says

mod ahead;
mod attention;
mod extras;
mod invariance;
mod last_rows;
mod linear;
mod linear_big;
mod linear_mid;
mod linear_wide;
mod loading;
mod planes;
mod quantised;
mod rows;
mod sampling;
mod support;
mod zoo;
