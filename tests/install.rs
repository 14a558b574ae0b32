//! Rung 1: what an installation comes to, through the installation interface, on a host under a temporary root.
//!
//! What is real: `ployzd` (its hidden verbs are the children that fetch and confine, and it is an artifact), the
//! release source (TLS, HTTP and every kind of misbehaviour on loopback), files, locks, processes, signals. What is
//! not: systemd, accounts, owners. Most releases hold a script that answers what preflight asks a `ployzd`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "install/admission.rs"]
mod admission;
#[path = "install/archives.rs"]
mod archives;
#[path = "install/channels.rs"]
mod channels;
#[path = "install/checksums.rs"]
mod checksums;
#[path = "install/child.rs"]
mod child;
#[path = "install/crashes.rs"]
mod crashes;
#[path = "install/filesystems.rs"]
mod filesystems;
#[path = "install/network.rs"]
mod network;
#[path = "install/plan.rs"]
mod plan;
#[path = "install/preflight.rs"]
mod preflight;
#[path = "install/previous.rs"]
mod previous;
#[path = "install/records.rs"]
mod records;
#[path = "install/settings.rs"]
mod settings;
#[path = "install/signals.rs"]
mod signals;
#[path = "install/signatures.rs"]
mod signatures;
#[path = "install/ways.rs"]
mod ways;
#[path = "install/world.rs"]
mod world;
