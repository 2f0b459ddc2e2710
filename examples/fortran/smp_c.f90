! SPDX-License-Identifier: Apache-2.0
! The interface of smp/c.h for Fortran, as far as the example needs it: copy what yours needs.
module smp_c
  use, intrinsic :: iso_c_binding
  implicit none

  integer(c_int), parameter :: smp_ok = 0
  integer(c_int32_t), parameter :: smp_float32 = 1, smp_float64 = 2
  integer(c_int32_t), parameter :: smp_column_major = 1

  type, bind(c) :: smp_tensor
    integer(c_int64_t) :: struct_size = 0
    integer(c_int32_t) :: dtype = 0
    integer(c_int32_t) :: layout = 0
    integer(c_int64_t) :: dims = 0
    integer(c_int64_t) :: sizes(8) = 0
    integer(c_int64_t) :: strides(8) = 0
    type(c_ptr) :: data = c_null_ptr
    type(c_ptr) :: name = c_null_ptr
    integer(c_int32_t) :: device = 0, device_index = 0
    type(c_ptr) :: dlpack = c_null_ptr, dlpack_versioned = c_null_ptr
  end type

  abstract interface
    function smp_gradient_callback(context, microbatch, outputs, gradients, count) bind(c)
      import :: c_ptr, c_int64_t, c_int, smp_tensor
      type(c_ptr), value :: context
      integer(c_int64_t), value :: microbatch, count
      type(smp_tensor), intent(in) :: outputs(*)
      type(smp_tensor), intent(in) :: gradients(*)
      integer(c_int) :: smp_gradient_callback
    end function
  end interface

  interface
    function smp_last_error() bind(c)
      import :: c_ptr
      type(c_ptr) :: smp_last_error
    end function

    function smp_set_threads(threads) bind(c)
      import :: c_int64_t, c_int
      integer(c_int64_t), value :: threads
      integer(c_int) :: smp_set_threads
    end function

    function smp_open_mpi(config, communicator, session) bind(c)
      import :: c_char, c_int64_t, c_ptr, c_int
      character(kind=c_char), intent(in) :: config(*)
      integer(c_int64_t), value :: communicator
      type(c_ptr), intent(out) :: session
      integer(c_int) :: smp_open_mpi
    end function

    function smp_close(session) bind(c)
      import :: c_ptr, c_int
      type(c_ptr), value :: session
      integer(c_int) :: smp_close
    end function

    function smp_load(session, train, eval) bind(c)
      import :: c_char, c_ptr, c_int
      type(c_ptr), value :: session, eval
      character(kind=c_char), intent(in) :: train(*)
      integer(c_int) :: smp_load
    end function

    function smp_optimizer(session, name, options) bind(c)
      import :: c_char, c_ptr, c_int
      type(c_ptr), value :: session
      character(kind=c_char), intent(in) :: name(*), options(*)
      integer(c_int) :: smp_optimizer
    end function

    function smp_train(session, inputs, count, loss_name, target, loss) bind(c)
      import :: c_char, c_ptr, c_int64_t, c_double, c_int, smp_tensor
      type(c_ptr), value :: session
      type(smp_tensor), intent(in) :: inputs(*)
      integer(c_int64_t), value :: count
      character(kind=c_char), intent(in) :: loss_name(*)
      type(smp_tensor), intent(in) :: target
      real(c_double), intent(out) :: loss
      integer(c_int) :: smp_train
    end function

    function smp_train_by_gradient(session, inputs, count, callback, context) bind(c)
      import :: c_ptr, c_funptr, c_int64_t, c_int, smp_tensor
      type(c_ptr), value :: session, context
      type(smp_tensor), intent(in) :: inputs(*)
      integer(c_int64_t), value :: count
      type(c_funptr), value :: callback
      integer(c_int) :: smp_train_by_gradient
    end function

    function smp_save_weights(session, folder, tag) bind(c)
      import :: c_char, c_ptr, c_int
      type(c_ptr), value :: session
      character(kind=c_char), intent(in) :: folder(*), tag(*)
      integer(c_int) :: smp_save_weights
    end function
  end interface

contains

  !> A tensor on an array of the caller, which has the attribute target.
  function tensor_of(array) result(tensor)
    real(c_float), intent(in), target, contiguous :: array(:, :)
    type(smp_tensor) :: tensor
    tensor%struct_size = c_sizeof(tensor)
    tensor%dtype = smp_float32
    tensor%layout = smp_column_major
    tensor%dims = 2
    tensor%sizes(1:2) = shape(array)
    tensor%data = c_loc(array)
  end function

  !> The text of the last call that failed.
  function error_text() result(text)
    character(:), allocatable :: text
    character(kind=c_char), pointer :: letters(:)
    integer :: length
    call c_f_pointer(smp_last_error(), letters, [100000])
    length = 0
    do while (letters(length + 1) /= c_null_char)
      length = length + 1
    end do
    allocate(character(length) :: text)
    text = transfer(letters(1:length), text)
  end function
end module
