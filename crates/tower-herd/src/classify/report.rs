//! The one way in which the sensor speaks to the provider.

use crate::{
    HasTask, Provider, Signal,
    provider::{Caller, Sensing},
};

/// One call under observation. Dropped before [`head`](Report::head), or before
/// [`end`](Report::end) after a good head, it counts as a call that its caller gave up.
pub(crate) struct Report {
    sensing: Sensing,
    #[cfg(test)]
    log: log::Log,
}

impl Report {
    #[inline]
    pub(crate) fn begin<Req: HasTask>(provider: &Provider, request: &Req) -> Self {
        Report {
            sensing: provider.begin(Caller::of(request.task())),
            #[cfg(test)]
            log: log::Log::begin(),
        }
    }

    /// The provider that is called, if this is one of the calls that are looked at closely.
    #[cfg(feature = "herd")]
    #[inline]
    pub(crate) fn sample(&self) -> Option<&Provider> {
        self.sensing.sample()
    }

    /// The provider that is called.
    #[cfg(feature = "herd")]
    #[inline]
    pub(crate) fn provider(&self) -> &Provider {
        self.sensing.provider()
    }

    /// What is shared of it.
    #[cfg(feature = "herd")]
    #[inline]
    pub(crate) fn core(&self) -> &std::sync::Arc<crate::provider::Core> {
        self.sensing.core()
    }

    /// The mark that this provider has learned of an outcome.
    #[inline]
    pub(crate) fn mark(&self, signal: Signal) -> Signal {
        signal.reported_by(self.sensing.number())
    }

    /// What a reply says, as far as the provider wants to know.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) fn read<Res, C: crate::Classify<Res>>(&self, classify: &C, reply: &Res) -> Signal {
        self.sensing.read(classify, reply)
    }

    /// The head of the reply, or the error in its place, says this.
    #[inline]
    pub(crate) fn head(&mut self, signal: &Signal) {
        #[cfg(test)]
        self.log.head(signal);
        self.sensing.outcome(signal);
    }

    /// The reply went on after a good head and has ended: well, or with this signal.
    #[inline]
    pub(crate) fn end(&mut self, signal: Option<&Signal>) {
        #[cfg(test)]
        self.log.end(signal);
        self.sensing.end(signal);
    }
}

/// What was reported on this thread, for tests.
#[cfg(test)]
pub(crate) mod log {
    use crate::{Kind, Signal};
    use std::cell::RefCell;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Entry {
        Begin,
        Head(Kind),
        End(Option<Kind>),
        Dropped,
    }

    thread_local! {
        static LOG: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
    }

    /// All entries since the last time.
    pub(crate) fn take() -> Vec<Entry> {
        LOG.take()
    }

    pub(crate) struct Log {
        is_open: bool,
    }

    impl Log {
        pub(crate) fn begin() -> Self {
            LOG.with_borrow_mut(|log| log.push(Entry::Begin));
            Log { is_open: true }
        }
        pub(crate) fn head(&mut self, signal: &Signal) {
            assert!(self.is_open, "reported twice");
            self.is_open = signal.kind.is_success();
            LOG.with_borrow_mut(|log| log.push(Entry::Head(signal.kind)));
        }
        pub(crate) fn end(&mut self, signal: Option<&Signal>) {
            assert!(self.is_open, "ended twice");
            self.is_open = false;
            LOG.with_borrow_mut(|log| log.push(Entry::End(signal.map(|signal| signal.kind))));
        }
    }

    impl Drop for Log {
        fn drop(&mut self) {
            if self.is_open {
                LOG.with_borrow_mut(|log| log.push(Entry::Dropped));
            }
        }
    }
}
