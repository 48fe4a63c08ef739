use super::{Profile, RampedReadmission};
use crate::{Provider, SettingsError, Switch};
use std::sync::{Arc, atomic::AtomicU64};
use tower_layer::Layer;

/// Gives a recovering provider its tasks back by and by. See the [module](super).
#[derive(Clone, Debug)]
pub struct RampedReadmissionLayer {
    provider: Provider,
    switch: Switch,
    untasked: Arc<AtomicU64>,
}

impl RampedReadmissionLayer {
    /// Along the provider's profile: the one that a layer was given for it, else
    /// [`Profile::default`], 5 % doubling every 5 s.
    #[must_use]
    pub fn new(provider: &Provider) -> Self {
        let switch = provider.has_ramp();
        RampedReadmissionLayer { provider: provider.clone(), switch, untasked: Arc::default() }
    }

    /// Along this profile, which is the provider's from now on, and that of its scopes.
    ///
    /// # Errors
    ///
    /// If it cannot be meant, or if the provider was given another one before.
    pub fn profile(self, profile: Profile) -> Result<Self, SettingsError> {
        self.provider.profile_ramp(profile)?;
        Ok(self)
    }

    /// Turned by this switch; a ladder that asks for this provider goes by it too. Default: that of the
    /// provider's layers before it, and for the first one of its own, which enforces.
    #[must_use]
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.provider.switch_ramp(switch);
        self.switch = switch.clone();
        self
    }

    /// Its switch.
    #[must_use]
    pub fn handle(&self) -> &Switch {
        &self.switch
    }
}

impl<S> Layer<S> for RampedReadmissionLayer {
    type Service = RampedReadmission<S>;
    fn layer(&self, inner: S) -> Self::Service {
        RampedReadmission {
            inner,
            provider: self.provider.clone(),
            switch: self.switch.clone(),
            untasked: self.untasked.clone(),
        }
    }
}
