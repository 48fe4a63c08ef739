//! The whole stack from one builder.

mod body;
mod builder;
mod classify;
mod handle;
mod layers;
mod rung;
mod service;
mod wire;

pub use body::HerdBody;
pub use builder::{Herd, HerdError, Ladder, One};
pub use classify::HerdClassify;
pub use handle::{Concern, HerdHandle};
pub use layers::{ByPrices, RungSettings};
pub use rung::Guarded;
pub use service::{HerdService, OneRung, Rungs};
/// The futures of a [`Herd`]'s services.
pub mod future {
    pub use super::{
        rung::ResponseFuture as GuardedFuture,
        service::{DirectFuture, ResponseFuture},
    };
}
