"""Offload: keeps tensors in host memory or in files until they are needed.

================  ===========================================================================
``pool``          reuses buffers: chooses one for each request, and frees unused ones
``host_storage``  the buffers: pinned host memory, or memory-mapped files
``copy_stream``   copies that overlap with computation: on a CUDA stream, or at once on a CPU
``activations``   offloads the tensors that forward passes save for backward
``optimizer``     offloads optimizer state, and updates one portion of parameters at a time
``layout``        which tensors can be offloaded, and how they are restored from bytes
``offload``       all of this for a learner
================  ===========================================================================

A rank on a GPU copies offloaded tensors back and computes with them on the GPU. A rank on a CPU computes with the
mapped files directly; the operating system writes them to disk when memory is short, and reads them again.
"""
