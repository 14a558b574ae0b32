//! Ployz Machine software.
use std::process::ExitCode;
/// Runs `ployzd`.
pub fn ployzd(_version: &'static str) -> ExitCode { ExitCode::SUCCESS }
/// Runs `ployz`.
pub fn ployz(_version: &'static str) -> ExitCode { ExitCode::SUCCESS }
