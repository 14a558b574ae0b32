//! Scenarios on real test machines: what a scenario says of its world, and what it may ask of it.
//!
//! Each test boots a machine of its own (`qualification/machine`), with releases that are built from this tree
//! (`qualification/release`) and, where it needs one, a release server of its own (`qualification/release-server`):
//!
//! ```no_run
//! # use scenarios::{Image, Machine, release, serve};
//! let server = serve("second-run").release(&release("1.4.0")).start();
//! let machine = Machine::named("second-run").image(Image::Trixie).served_by(&server).installed("1.4.0").boot();
//! let run = machine.run("/usr/local/bin/ployzd install --version 1.4.0 --json").expect(0);
//! assert_eq!(run.outcome()["succeeded"]["nothing_was_needed"], true);
//! ```
//!
//! They need root and what `qualification/setup` makes, and run only when they are asked for:
//! `cargo test -p ployz-qualification-scenarios`. Missing prerequisites fail, they never skip.
//!
//! `PLOYZ_LAB=ID` chooses the lab (by default one of this process; another user of the same lab is waited for),
//! `PLOYZ_BUILT=DIR` a directory that keeps releases, so that all test programs of one run see the same bytes.
//!
//! | module | what |
//! | --- | --- |
//! | `lab` | the network of this process's machines, and that nothing of it is left behind |
//! | `machine`, `look` | a machine: made, asked, looked at, restarted |
//! | `releases`, `server` | what can be installed, and where it is served |
//! | `docker` | real Docker in a machine, and a client of a container |
//! | `registry` | images that Docker pulls, and how that goes wrong |
//! | `client` | a client of the Machine API that asks all the time |
//! | `upgrades` | upgrades that are asked for through the daemon |
//! | `crash` | an installation ended, or troubled, at one call |
//! | `peaks`, `ssh` | how much memory processes take; logins that are cut |
//! | `run` | a command that ended: its output, or a panic that shows all of it |

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    reason = "a fixture that can't do its work fails the test, and says why"
)]

mod client;
pub mod crash;
mod docker;
mod lab;
mod look;
mod machine;
pub mod peaks;
mod registry;
mod releases;
mod run;
mod server;
pub mod ssh;
mod upgrades;
pub mod vm;

pub use client::{Client, Heard};
pub use docker::{Served, Traffic};
pub use lab::{note, repository, scratch};
pub use look::{Facts, Watched};
pub use machine::{Background, Image, Machine, Plan};
pub use registry::Pullable;
pub use releases::{Release, release, release_for, release_padded, release_variant};
pub use run::{Run, host, host_within};
pub use server::{Server, Serving, serve};
pub use upgrades::hold;
