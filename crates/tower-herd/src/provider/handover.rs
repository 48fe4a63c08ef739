//! How a layer passes something to a layer below it, within one `call`.
//!
//! Two things cross layers of one stack while `call` runs, which is synchronous. A slot that was
//! taken further out (by a ladder, or by the pause layer when a pause ends) must reach the fleet
//! limit below, and may not travel in the request's extensions, which can be cloned. And a gate must
//! know whether a sensor below it watches the call, or whether it has to watch for itself. Both are
//! kept per thread for just as long as the `call` lasts; where a foreign layer defers the inner call,
//! the slot simply comes back and the layer below takes one of its own. The gate then watches for
//! itself too; what the sensor has told already is marked in the reply's signal, and told once.

use super::{Core, Slot, control::Admitted};
use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

thread_local! {
    static SLOT: RefCell<Option<Slot>> = const { RefCell::new(None) };
    static SENSED: Cell<usize> = const { Cell::new(0) };
    static ADMITTED: Cell<Option<(usize, Admitted)>> = const { Cell::new(None) };
}

pub(super) fn address(core: &Arc<Core>) -> usize {
    Arc::as_ptr(core).addr()
}

/// Runs `call` with `slot` on offer, and drops it afterwards if nobody took it.
pub(crate) fn offering<R>(slot: Slot, call: impl FnOnce() -> R) -> R {
    let outer = SLOT.with(|cell| cell.borrow_mut().replace(slot));
    // Restored on unwind too: a panic in a service must not leave its slot to the next call.
    let restore = Restore(Some(outer));
    let result = call();
    drop(restore);
    result
}

struct Restore(Option<Option<Slot>>);

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(outer) = self.0.take() {
            let left = SLOT.with(|cell| std::mem::replace(&mut *cell.borrow_mut(), outer));
            drop(left);
        }
    }
}

/// Takes the slot on offer, if it is one of this provider.
pub(crate) fn take(core: &Arc<Core>) -> Option<Slot> {
    SLOT.with(|cell| cell.borrow_mut().take_if(|slot| slot.is_of(core)))
}

/// Whether a slot of this provider is on offer, and whether it is a probe's.
pub(crate) fn offered(core: &Arc<Core>) -> Option<bool> {
    SLOT.with(|cell| cell.borrow().as_ref().filter(|slot| slot.is_of(core)).map(Slot::is_probe))
}

/// Says that somebody on the way down watches this call.
pub(crate) fn mark_sensed(core: &Arc<Core>) {
    SENSED.set(address(core));
}

/// Runs `call`; whether somebody below said that it watches the call.
pub(crate) fn sensed<R>(core: &Arc<Core>, call: impl FnOnce() -> R) -> (R, bool) {
    SENSED.set(0);
    let result = call();
    (result, SENSED.get() == address(core))
}

/// Runs `call`, an admitted one: its sensor below learns what it was admitted as.
#[inline]
pub(crate) fn admitting<R>(core: &Arc<Core>, admitted: Option<Admitted>, call: impl FnOnce() -> R) -> R {
    ADMITTED.set(admitted.map(|admitted| (address(core), admitted)));
    let result = call();
    ADMITTED.set(None);
    result
}

/// What the call that is being made was admitted as.
#[inline]
pub(super) fn admitted(core: &Arc<Core>) -> Option<Admitted> {
    ADMITTED.get().filter(|(of, _)| *of == address(core)).map(|(_, admitted)| admitted)
}
