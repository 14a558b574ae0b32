//! The release server: a real HTTPS file server that misbehaves when it is asked to.
//!
//! Tests and test machines fetch releases from it. It writes HTTP itself, because much of what a client must
//! survive (a length that lies, a reset in the middle, no `close_notify`) is what a good HTTP library refuses
//! to send.
//!
//! | module | what |
//! | --- | --- |
//! | [`Server`], [`Options`], [`Tls`] | a running server, with its rules file and control socket; stops when dropped |
//! | [`Rule`] | what is answered wrongly, for which path, how many times |
//! | [`Record`] | what was asked and what was answered |
//! | [`Ca`] | the authority that signs the server's certificates |
//! | [`release`] | builds release trees: good ones, and every kind of hostile one |
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! kit::release::tree("site".as_ref(), "1.4.0", &[("ployzd", b"#!/bin/sh\n".as_slice())])?;
//! let server = kit::Server::start(kit::Options::new("site"))?;
//! server.rule(kit::Rule::new("/v1/stable").times(2).status(503).header("Retry-After", "1"));
//! // … run the client against server.url(), trusting server.ca_pem() …
//! assert_eq!(server.requests().len(), 3);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod answer;
mod body;
mod certificates;
mod connection;
mod control;

mod files;
mod head;
mod log;
pub mod release;
mod rule;
mod rules;
mod send;
mod server;
mod wire;

pub use certificates::Ca;
pub use log::{Event, Record};
pub use rule::{Accept, Announce, Cut, Drip, How, RangeLie, Redirect, Rule};
pub use server::{Options, Server, Tls};
