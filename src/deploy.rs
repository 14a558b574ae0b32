//! Services: what may be deployed, the door at which the unprivileged daemon asks for it, and the worker behind that door.
//!
//! The daemon reaches Docker only here. What it can have is what [`template`] makes of a [`spec::Spec`]: one container of
//! ours, in a network of its own, with named volumes and published ports. There is no field for a host path, a device, a
//! capability, a namespace of the host or another's container, and an unknown field refuses the whole.
//!
//! | file | owns |
//! | --- | --- |
//! | [`spec`] | what may be asked for, bounded and checked |
//! | [`door`] | what is said over the privileged socket |
//! | [`template`] | from a specification to what Docker is asked to make |
//! | [`state`] | who deploys now, which engine holds the services, a replacement that is not finished |
//! | [`engine`] | our containers, volumes and ports in Docker: found, told from others' |
//! | [`pull`] | an image that is pulled: how far it is, and whether anything still comes |
//! | [`replace`] | a Deploy: everything is there before the old container stops, and it serves again when the new one does not |
//! | [`worker`] | one connection of the door, served |

pub(crate) mod door;
mod engine;
mod pull;
mod replace;
pub(crate) mod spec;
mod state;
mod template;
pub(crate) mod worker;
