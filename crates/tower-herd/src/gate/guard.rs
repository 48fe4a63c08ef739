//! A place in the queue as a value that gives itself back.

use std::{fmt, task::Context};

use super::{Claimed, EntryId, Full, Gate, Pacer, Waiter, sync::Arc};
use crate::clock::Time;

/// What leads to a gate: an `Arc` of one, or of something that holds one.
pub trait Handle {
    /// The pacer of the gate.
    type Pacer: Pacer;

    /// The gate, always the same.
    fn gate(&self) -> &Gate<Self::Pacer>;
}

impl<P: Pacer> Handle for Arc<Gate<P>> {
    type Pacer = P;

    fn gate(&self) -> &Gate<P> {
        self
    }
}

impl<P: Pacer> Handle for &Gate<P> {
    type Pacer = P;

    fn gate(&self) -> &Gate<P> {
        self
    }
}

/// A place in the queue: dropped, it is cancelled and the next is woken.
#[must_use = "dropped, it is cancelled"]
pub struct Entry<H: Handle> {
    // None once it was served
    handle: Option<H>,
    id: EntryId,
}

impl<H: Handle> Entry<H> {
    /// Joins the queue of the gate.
    pub fn enqueue(handle: H, waiter: Waiter) -> Result<Self, Full> {
        let id = handle.gate().enqueue(waiter)?;
        let handle = Some(handle);
        Ok(Entry { handle, id })
    }

    /// The name of this place.
    pub fn id(&self) -> EntryId {
        self.id
    }

    /// [`Gate::poll_claim`], with the gate that the slot is to be given back to.
    ///
    /// # Panics
    ///
    /// If it has been served before.
    pub fn poll_claim(&mut self, now: Time, cx: &mut Context<'_>) -> Claimed<Served<H>> {
        let handle = self.handle.take().expect("polled after it was served");
        match handle.gate().poll_claim(self.id, now, cx) {
            Claimed::Got(admitted) => Claimed::Got((handle, admitted)),
            Claimed::Wait { again_at } => {
                self.handle = Some(handle);
                Claimed::Wait { again_at }
            }
        }
    }
}

/// The gate of a slot that was claimed, and what the pacer said when it gave it.
pub type Served<H> = (H, <<H as Handle>::Pacer as Pacer>::Admitted);

impl<H: Handle> Drop for Entry<H> {
    fn drop(&mut self) {
        if let Some(handle) = &self.handle {
            handle.gate().cancel(self.id);
        }
    }
}

impl<H: Handle> fmt::Debug for Entry<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entry").field(&self.id).finish()
    }
}

/// One slot: dropped, it is given back. Outside tests the provider has a guard of its own.
#[cfg(test)]
#[must_use = "dropped, it is given back"]
pub struct Permit<H: Handle> {
    // None once it was left to linger
    handle: Option<H>,
}

#[cfg(test)]
impl<H: Handle> Permit<H> {
    /// The guard of a slot that the caller has taken from this gate.
    pub fn new(handle: H) -> Self {
        let handle = Some(handle);
        Permit { handle }
    }

    /// Takes a slot by [`Gate::try_acquire`].
    pub fn try_acquire(handle: H) -> Result<Self, H> {
        if handle.gate().try_acquire() { Ok(Permit::new(handle)) } else { Err(handle) }
    }

    /// Gives the slot back at `until`: its call was dropped, but may still run.
    pub fn release_at(mut self, until: Time) {
        if let Some(handle) = self.handle.take() {
            handle.gate().release_at(until);
        }
    }
}

#[cfg(test)]
impl<H: Handle> Drop for Permit<H> {
    fn drop(&mut self) {
        if let Some(handle) = &self.handle {
            handle.gate().release();
        }
    }
}

#[cfg(test)]
impl<H: Handle> fmt::Debug for Permit<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Permit")
    }
}
