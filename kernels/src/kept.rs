//! Values that stay on a device from call to call, each by its type: tables, kernels, marks.

use std::any::{Any, TypeId};
use std::collections::HashMap;

#[derive(Debug, Default)]
pub(crate) struct Kept(HashMap<TypeId, Box<dyn Any>>);

impl Kept {
    pub(crate) fn get<T: Any>(&self) -> Option<&T> {
        self.0.get(&TypeId::of::<T>())?.downcast_ref()
    }

    /// The one `T` of this device, its default at first.
    pub(crate) fn of<T: Any + Default>(&mut self) -> &mut T {
        let kept = self.0.entry(TypeId::of::<T>()).or_insert_with(|| Box::<T>::default());
        kept.downcast_mut().expect("kept by its type")
    }
}
