//! Any bytes are one frame or an error; what is accepted is exactly what the encoder writes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemill_mpi::frame::{Frame, Invitation};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(frame) = Frame::from_bytes(bytes) {
        let mut again = Vec::new();
        frame.encode(&mut again).expect("it was within every cap");
        assert_eq!(again, bytes);
    }
    if let Ok(invitation) = Invitation::decode(bytes) {
        assert!(invitation.encode().is_ok());
    }
});
