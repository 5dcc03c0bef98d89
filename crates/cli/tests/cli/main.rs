//! The built program, run as people run it: what it prints, how it ends, and what it leaves behind.

#![allow(missing_docs, clippy::unwrap_used)]

mod binary;
mod capacity;
mod conversation;
mod http;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "hub")]
mod hub_double;
mod inspection;
mod packages;
mod refusals;
mod serving;
