//! Ployz Machine software: a daemon, and the installer that puts it on a host and upgrades it without ever lying
//! about it.
//!
//! | module | owns |
//! | --- | --- |
//! | [`install`] | THE module: what is installed, by whom, how far it came, whether it runs |
//! | `daemon` | the unprivileged Machine daemon and its API |
//! | `deploy` | services: what may be deployed, the door at which the daemon asks, the worker behind it |
//! | `volume_plugin` | Docker's volumes on this Machine: directories, or ZFS datasets |
//! | `cli` | verbs, flags, screens, exit codes: the only place that prints |
//! | [`host`] | every path, and who may own what |
//! | `command`, `systemd`, `docker`, `http`, `line`, `lock`, `durable`, `storage`, `text`, [`interrupt`] | tools that know nothing of the above |
//!
//! Imports point down this table. `unsafe` is forbidden.

pub mod host;
pub mod install;
pub mod interrupt;

mod cli;
mod command;
mod daemon;
mod deploy;
mod docker;
mod durable;
mod http;
mod line;
mod lock;
mod storage;
mod systemd;
mod text;
mod volume_plugin;

use std::process::ExitCode;

/// Runs `ployzd` with the arguments of this process, as release `version`.
pub fn ployzd(version: &'static str) -> ExitCode {
    cli::ployzd::run(version)
}

/// Runs `ployz` with the arguments of this process, as release `version`.
pub fn ployz(version: &'static str) -> ExitCode {
    cli::operator::run(version)
}
