//! How a layer passes something to a layer below it, within one `call`.
//!
//! Two things cross layers of one stack while `call` runs, which is synchronous. A slot that was
//! taken further out (by a ladder, or by the pause layer when a pause ends) must reach the fleet
//! limit below, and may not travel in the request's extensions, which can be cloned. And a gate must
//! know whether a sensor below it watches the call, or whether it has to watch for itself. Both are
//! kept per thread for just as long as the `call` lasts; where a foreign layer defers the inner call,
//! the slot simply comes back and the layer below takes one of its own. The gate then watches for
//! itself too; what the sensor has told already is marked in the reply's signal, and told once.
//!
//! Most calls find nothing here: three plain numbers, the addresses of the providers concerned, tell
//! them so without a look at the rest.

use super::{Core, Slot, control::Admitted};
use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

thread_local! {
    /// Whose slot is on offer; 0: none is.
    static OFFERED: Cell<usize> = const { Cell::new(0) };
    static SLOT: RefCell<Option<Slot>> = const { RefCell::new(None) };
    /// Whose call is watched.
    static SENSED: Cell<usize> = const { Cell::new(0) };
    /// Who admitted the call that is being made; 0: the fast path, which has nothing to tell.
    static ADMITTED_BY: Cell<usize> = const { Cell::new(0) };
    static ADMITTED: Cell<Option<Admitted>> = const { Cell::new(None) };
    /// At whose gate the call waits that is being made, or polled; 0: at none, it was sent.
    static QUEUED: Cell<usize> = const { Cell::new(0) };
    /// The call that is being made comes from a ladder, which has other rungs: no gate below makes it wait.
    static IMPATIENT: Cell<bool> = const { Cell::new(false) };
}

#[inline]
pub(crate) fn address(core: &Arc<Core>) -> usize {
    Arc::as_ptr(core).addr()
}

/// Runs `call` with `slot` on offer, and drops it afterwards if nobody took it.
#[inline]
pub(crate) fn offering<R>(slot: Slot, call: impl FnOnce() -> R) -> R {
    OFFERED.set(slot.address());
    let outer = SLOT.with(|cell| cell.borrow_mut().replace(slot));
    // Restored on unwind too: a panic in a service must not leave its slot to the next call.
    let restore = Restore(Some(outer));
    let result = call();
    drop(restore);
    result
}

/// [`offering`], for who wants the slot back if nobody took it.
#[cfg(feature = "breaker")]
pub(crate) fn lending<R>(slot: Slot, call: impl FnOnce() -> R) -> (R, Option<Slot>) {
    let mut left = None;
    let result = offering(slot, || {
        let result = call();
        if OFFERED.replace(0) != 0 {
            left = SLOT.with(|cell| cell.borrow_mut().take());
        }
        result
    });
    (result, left)
}

struct Restore(Option<Option<Slot>>);

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(outer) = self.0.take() {
            OFFERED.set(outer.as_ref().map_or(0, Slot::address));
            let left = SLOT.with(|cell| std::mem::replace(&mut *cell.borrow_mut(), outer));
            drop(left);
        }
    }
}

/// Takes the slot on offer, if it is one of this provider.
#[inline]
pub(crate) fn take(core: &Arc<Core>) -> Option<Slot> {
    if OFFERED.get() != address(core) {
        return None;
    }
    OFFERED.set(0);
    SLOT.with(|cell| cell.borrow_mut().take())
}

/// Whether a slot of this provider is on offer, and whether it is a probe's.
pub(crate) fn offered(core: &Arc<Core>) -> Option<bool> {
    if OFFERED.get() != address(core) {
        return None;
    }
    SLOT.with(|cell| cell.borrow().as_ref().map(Slot::is_probe))
}

/// Says that somebody on the way down watches this call.
#[inline]
pub(crate) fn mark_sensed(core: &Arc<Core>) {
    SENSED.set(address(core));
}

/// Says that the call waits at a gate of this provider, and was not sent.
#[inline]
pub(crate) fn mark_queued(provider: usize) {
    QUEUED.set(provider);
}

/// Says that the call is being sent; also to be called before a call is made, whoever wants to know.
#[inline]
pub(crate) fn mark_sent() {
    QUEUED.set(0);
}

/// After a call was made, or polled while it waited: whether it still waits. Where that cannot be seen, since
/// a foreign layer defers the call, it counts as sent.
#[inline]
pub(crate) fn is_queued(provider: usize) -> bool {
    QUEUED.get() == provider
}

/// Runs `call`, which a ladder makes: it is refused by who would have it wait.
#[inline]
pub(crate) fn impatient<R>(call: impl FnOnce() -> R) -> R {
    struct Reset(bool);
    impl Drop for Reset {
        fn drop(&mut self) {
            IMPATIENT.set(self.0);
        }
    }
    let _reset = Reset(IMPATIENT.replace(true));
    call()
}

/// Whether the call that is being made comes from a ladder.
#[inline]
pub(crate) fn is_impatient() -> bool {
    IMPATIENT.get()
}

// What follows comes in two steps around the inner `call`, and not as a function that runs it: a closure
// would move the request and the future once more for each layer.

/// To be called before the inner `call`: nobody watches yet.
#[inline]
pub(crate) fn unwatched() {
    SENSED.set(0);
}

/// To be called after it: whether somebody below said that it watches the call.
#[inline]
pub(crate) fn is_watched(core: &Arc<Core>) -> bool {
    SENSED.get() == address(core)
}

/// While it lives, the call that is being made is an admitted one: its sensor learns what it was admitted
/// as.
#[must_use]
pub(crate) struct Admitting(());

impl Admitting {
    #[inline]
    pub(crate) fn new(core: &Arc<Core>, admitted: Option<Admitted>) -> Self {
        match admitted {
            // Not what a call further out was admitted as.
            None => ADMITTED_BY.set(0),
            Some(_) => {
                ADMITTED_BY.set(address(core));
                ADMITTED.set(admitted);
            }
        }
        Admitting(())
    }
}

impl Drop for Admitting {
    #[inline]
    fn drop(&mut self) {
        ADMITTED_BY.set(0);
    }
}

/// What the call that is being made was admitted as.
#[inline]
pub(super) fn admitted(core: &Arc<Core>) -> Option<Admitted> {
    if ADMITTED_BY.get() == address(core) { ADMITTED.get() } else { None }
}
