//! One file a command.

pub mod bench;
pub mod chat;
mod generate;
pub mod inspect;
pub mod plan;
pub mod pull;
pub mod run;
pub mod serve;
